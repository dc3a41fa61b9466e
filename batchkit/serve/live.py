"""What a batch's run says of it while it works."""

from __future__ import annotations

from batchkit.errors import BatchkitError
from batchkit.runs.status import counts_of
from batchkit.serve.settings import Settings
from batchkit.serve.store import Object
from batchkit.storage.runfolder import is_run


def live(batch: Object, settings: Settings) -> Object:
    """With the counts that its run has now, if it has not ended."""
    folder = settings.runs / batch["id"]
    if batch["status"] not in ("in_progress", "cancelling", "finalizing") or not is_run(folder):
        return batch
    try:
        found = counts_of(folder)
    except BatchkitError:  # its log is being opened
        return batch
    counts = {
        "total": batch["request_counts"]["total"],
        "completed": found.totals.ok,
        "failed": found.totals.failed,
    }
    return {**batch, "request_counts": counts}
