"""Writes the files of an export; refuses those of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from batchkit.errors import StoreError
from batchkit.execution.progress import LOG
from batchkit.storage.checkpoint import CHECKPOINT
from batchkit.storage.files import replacing
from batchkit.storage.ledger import RESULTS
from batchkit.storage.manifest import read_manifest
from batchkit.storage.runfolder import JOB, LOCK, MANIFEST, is_run
from batchkit.storage.score_store import SCORES

_OWN_FILES = {
    RESULTS: "ledger",
    CHECKPOINT: "checkpoint",
    MANIFEST: "manifest",
    JOB: "job",
    LOG: "log",
    SCORES: "scores",
    LOCK: "lock",
}


@contextmanager
def exporting(path: Path, folder: Path) -> Iterator[Path]:
    """A temporary file that becomes ``path`` on success.

    Raises:
        StoreError: ``path`` is one of the files of a run (of any run, or by a hard link of that in
            ``folder``), or the input of the run in ``folder``.
    """
    _refuse_own_file(path, folder)
    with replacing(path) as temporary:
        yield temporary


def _refuse_own_file(path: Path, folder: Path) -> None:
    resolved = path.resolve()
    role = _OWN_FILES.get(resolved.name) if is_run(resolved.parent) else None
    for name, known in _OWN_FILES.items():  # also under another name, as a hard link
        if path.exists() and (own := folder / name).exists() and path.samefile(own):
            role = known
    for file in read_manifest(folder).input:
        if path.exists() and (read := Path(file.path)).exists() and path.samefile(read):
            role = "input"
    if role is not None:
        raise StoreError(f"{path}: is the {role} of a run; write to another file")
