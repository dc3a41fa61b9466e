"""``run.reuse``: which other runs have answers that hold for this run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from batchkit.config.tables import JobConfig
from batchkit.errors import JobError
from batchkit.runs.listing import near_run
from batchkit.storage.checkpoint import check_log
from batchkit.storage.identity import differences, identity
from batchkit.storage.manifest import read_manifest
from batchkit.storage.runfolder import is_run
from batchkit.storage.starts import read_history

# Keys that decide the answer to a request and are not part of the request, which ``request_hash`` covers.
_BESIDE_REQUEST = re.compile(r"task|engines?\.|media\.|output\.(prompt|vector_dtype)")
# With several generations, the hash is of the request before a retry changed it.
_OF_RETRIES = re.compile(r"retry\.")


def check_reuse(job: JobConfig) -> None:
    """Raise JobError if a folder in ``run.reuse`` is not another run's folder, or is damaged."""
    for name in job.run.reuse:
        folder = Path(name)
        if not is_run(folder):
            raise JobError(f"run.reuse: {folder}: not a run folder{near_run(folder)}")
        if folder.resolve() == job.folder.resolve():
            raise JobError(
                f"run.reuse: {folder}: is the folder of this run, whose equal requests run.deduplicate finds"
            )
        check_log(folder)


def reusable(job: JobConfig, say: Callable[[str], None]) -> Iterator[Path]:
    """Yield the folders in ``run.reuse`` whose answers were made under an equal identity. ``say`` gets a line for each
    other folder."""
    if not job.run.reuse:
        return  # hashing the model's files takes time
    now = identity(job)
    for name in job.run.reuse:
        folder = Path(name)
        then = read_history(folder).added_to(read_manifest(folder)).identity
        changes = [
            line
            for line in differences(then, now)
            if _BESIDE_REQUEST.match(line) or (job.has_several and _OF_RETRIES.match(line))
        ]
        if changes:
            say(f"nothing is reused from {folder}, whose run differs: {'; '.join(changes)}")
        else:
            yield folder
