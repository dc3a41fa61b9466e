"""Where exports and reports may not go: onto what a run lives on."""

from __future__ import annotations

from pathlib import Path

from batchkit.errors import StoreError
from batchkit.execution.progress import LOG
from batchkit.storage.ledger import RESULTS
from batchkit.storage.runfolder import JOB, MANIFEST, is_run
from batchkit.storage.score_store import SCORES
from batchkit.storage.store import CHECKPOINT

_OWN_FILES = {
    RESULTS: "ledger",
    CHECKPOINT: "checkpoint",
    MANIFEST: "manifest",
    JOB: "job",
    LOG: "log",
    SCORES: "scores",
}


def refuse_own_file(path: Path, folder: Path) -> None:
    """Raises StoreError where ``path`` is a file that a run lives on: that in ``folder``, or any."""
    resolved = path.resolve()
    role = _OWN_FILES.get(resolved.name) if is_run(resolved.parent) else None
    for name, known in _OWN_FILES.items():  # by another name, too: a hard link
        if path.exists() and (own := folder / name).exists() and path.samefile(own):
            role = known
    if role is not None:
        raise StoreError(f"{path}: is the {role} of a run; write to another file")
