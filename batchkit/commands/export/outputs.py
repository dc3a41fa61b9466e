"""Refuses exports over the files of a run."""

from __future__ import annotations

from pathlib import Path

from batchkit.errors import StoreError
from batchkit.execution.progress import LOG
from batchkit.storage.checkpoint import CHECKPOINT
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


def refuse_own_file(path: Path, folder: Path) -> None:
    """Raises StoreError if ``path`` is one of the files of a run (of any run, or by a hard link of
    that in ``folder``), or the input of the run in ``folder``."""
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
