"""Rules for export files: the formats, the targets of `run --output`, and the files that an export may replace. Files
of a run and its input are never overwritten."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from batchkit.config.export_target import Target, target_of
from batchkit.config.installation import how_to_install
from batchkit.config.regular_file import open_regular
from batchkit.config.seams import EXPORTS
from batchkit.config.tables import FOR_VECTORS, WITH_VECTORS, JobConfig
from batchkit.config.urls import bare, is_remote
from batchkit.errors import JobError, StoreError
from batchkit.sources.finding import input_files
from batchkit.sources.formats import format_of
from batchkit.storage.checkpoint import CHECKPOINT
from batchkit.storage.files import replacing
from batchkit.storage.log import RESULTS, STEPS
from batchkit.storage.metrics import METRICS
from batchkit.storage.runfolder import JOB, LOCK, LOG, MANIFEST, is_run
from batchkit.storage.score_store import SCORES
from batchkit.storage.starts import STARTS, current_manifest
from batchkit.storage.vectors import VECTORS, segments_of

_OWN_FILES = (RESULTS, STEPS, CHECKPOINT, MANIFEST, STARTS, JOB, LOG, SCORES, METRICS, LOCK)


def is_foreign_file(path: Path) -> bool:
    """Return True if ``path`` is a file that batchkit did not write. Its first bytes decide; an empty file is not
    foreign."""
    if not path.is_file() or not path.stat().st_size:
        return False
    match path.suffix.lower():
        case ".csv":
            return not _beginning(path).startswith(b"index,id,")
        case ".jsonl":
            return b'"custom_id":' not in (line := _beginning(path)) and b'"attempt":' not in line
        case ".parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            try:
                return b"batchkit.run" not in (pq.read_schema(path).metadata or {})
            except (pa.ArrowException, OSError):
                return True
    return False


def _beginning(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read(1 << 16)
    except OSError:
        return b""


class Export(NamedTuple):
    """An export format.

    - ``write``: a function that gets the run folder and the output path, and returns the number of rows in each file
      that it wrote.
    - ``name``: the default output path in the run folder. A name without a suffix is a folder. "" means
      ``results.FORMAT``.
    - ``says``: True if ``write`` prints messages. It then gets two more arguments: functions that print one line. The
      second function is for missing columns of the input.
    - ``package``: the package that writes the format, if the format is a table in a folder. The extra with the name of
      the format installs it.
    - ``is_foreign``: a function that returns True if the output path is not an older export, so that only ``--force``
      replaces it.
    """

    write: Callable[..., dict[Path, int]]
    name: str = ""
    says: bool = False
    package: str = ""
    is_foreign: Callable[[Path], bool] = is_foreign_file


def export_of(name: str) -> Export:
    """Return the export format ``name``. If another package registered only a function, return an ``Export`` with this
    function."""
    found = EXPORTS.load(name)
    return found if isinstance(found, Export) else Export(found)


def output_target(text: str, job: JobConfig) -> Target:
    """Return the target of ``run --output``. For an OpenAI batch file as input, ``.jsonl`` means OpenAI's format.

    Raises:
        JobError: The export can't be written to this target.
    """
    if job.input.shard is not None:
        raise JobError(
            f"--output {text}: each shard would write the same file; leave it out, then `batchkit merge`"
            " the shards and `batchkit export` the result"
        )
    target = target_of(text, key="--output")
    if target.format == "npy" and job.task not in WITH_VECTORS:
        raise JobError(
            f'--output {text}: .npy is for {FOR_VECTORS}, but the task of this job is "{job.task}"; use .parquet'
        )
    check_table(target, "--output")
    files = input_files(job.input)
    if not target.is_remote:
        _check_writable(Path(text), files, export_of(target.format))
    is_batch = {format_of(file, job.input) for file in files} == {"openai-batch"}
    return target._replace(format="openai") if is_batch and target.format == "jsonl" else target


def check_table(target: Target, key: str = "FILE") -> None:
    """Raise JobError if ``target`` is a table that can't be written: at an address, or if its package is missing."""
    package = export_of(target.format).package
    if package and target.is_remote:
        raise JobError(
            f"{key} {target}: {target.format} is written to local folders only; export to a folder, and copy it"
        )
    if package and find_spec(package) is None:
        raise JobError(
            f"{key} {target}: {package} is not installed: {how_to_install(target.format)}"
        )


def _check_writable(path: Path, inputs: Sequence[str], form: Export) -> None:
    if path.is_dir() and not form.package:
        raise JobError(f"--output {path}: is a folder; give a file in it")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        problem = "can't be written to" if folder.is_dir() else "is not a folder"
        raise JobError(f"--output {path}: {folder} {problem}; choose another folder")
    if path.exists() and any(Path(file).exists() and path.samefile(file) for file in inputs):
        raise JobError(f"--output {path}: is the input; write to another file")
    if form.is_foreign(path):
        raise JobError(
            f"--output {path}: exists, and was not written by batchkit; give another path"
        )


def check_folder(place: str, job: JobConfig) -> None:
    """Raise JobError if ``place``, a folder or address in ``output.export``, can't get the parts of the job's run."""
    path, files = Path(place), input_files(job.input)
    problem = ""
    if not is_remote(place) and path.exists() and not path.is_dir():
        problem = "is a file"
    elif not is_remote(place) and is_run(path):
        problem = "is a run folder"
    elif any(
        file.rpartition("/")[0] == place or Path(file).resolve().parent == path.resolve()
        for file in files
    ):
        problem = "has the input"
    if problem:
        raise JobError(f"output.export: {bare(place)}: {problem}; name another folder")


@contextmanager
def exporting(path: Path, folder: Path) -> Iterator[Path]:
    """Yield a temporary file that replaces ``path`` if the block succeeds.

    Raises:
        StoreError: ``path`` is a file of a run, or the input of the run in ``folder``.
    """
    refuse_own_file(path, folder)
    with replacing(path) as temporary:
        yield temporary


def refuse_own_file(path: Path, folder: Path) -> None:
    parent, own = path.resolve().parent, [folder / name for name in _OWN_FILES]
    own += [
        *segments_of(folder).values(),
        *(Path(file.path) for file in current_manifest(folder).input),
    ]
    if (
        (is_run(parent) and path.resolve().name in _OWN_FILES)
        or (parent.name == VECTORS and is_run(parent.parent))
        or (path.exists() and any(file.exists() and path.samefile(file) for file in own))
    ):
        raise StoreError(
            f"{path}: belongs to a run, as one of its files or its input; write to another file"
        )
