"""``--skip-from``: rows that have an answer in another run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from batchkit.config.tables import JobConfig
from batchkit.errors import JobError
from batchkit.sources import is_fallback, never
from batchkit.sources.input import Input, from_job
from batchkit.sources.rowhash import input_hash
from batchkit.storage.checkpoint import check_log
from batchkit.storage.lines import failure_kind
from batchkit.storage.log import RESULTS
from batchkit.storage.manifest import read_manifest
from batchkit.storage.newest import read_newest
from batchkit.storage.runfolder import is_run
from batchkit.types import Row


def done_in(folder: Path, job: JobConfig, source: Input) -> Callable[[Row], bool]:
    """Whether a row has an answer in the run in ``folder``; each answer there counts for one row.

    Without ids of one field, ``input.id``, rows are named by their index or by another field, and the
    name may be another row's: they must have the same fields, too. So must rows that share their id,
    there or in the input, which is read for that once an id's fields differ; and rows that can be
    read only once.
    """
    if not is_run(folder):
        raise JobError(f"--skip-from {folder}: not a run folder")
    check_log(folder)
    log, times, id_field = folder / RESULTS, Counter[str](), job.input.id
    if id_field is not None and read_manifest(folder).identity.get("input.id") == id_field:
        times.update(record["id"] for record in read_newest(log))

    def name(row_id: str, row_hash: str | None) -> str:
        return row_id if times[row_id] == 1 else f"{row_hash} {row_id}"

    left, hash_of = Counter[str](), dict[str, str | None]()
    for record in read_newest(log):
        if failure_kind(record) is None and not is_fallback(record["id"]):
            left[name(record["id"], record.get("input_hash"))] += 1
            hash_of[record["id"]] = record.get("input_hash")
    shared: set[str] | None = None

    def is_shared(row_id: str) -> bool:
        nonlocal shared
        if shared is None:
            shared = shared_ids(job, source)
        return row_id in shared

    def is_done(row: Row) -> bool:
        known = input_hash(row.fields)
        if times[row.id] == 1 and left[row.id]:
            differs = hash_of[row.id] != known
            is_other = differs and (source.files is None or is_shared(row.id))
            found = None if is_other else row.id
        else:
            found = each if left[each := name(row.id, known)] else None
        if found is None:
            return False
        left[found] -= 1
        return True

    return is_done


def shared_ids(job: JobConfig, source: Input) -> set[str]:
    """The ids that several rows have, also rows that ``input.where`` leaves out: the other run may have
    had those."""
    if job.input.where:  # not with rows from Python
        table = job.input.model_copy(update={"where": {}})
        source = from_job(job.model_copy(update={"input": table}))
    ids = Counter(row.id for row in source.everything(never))
    return {each for each, n_rows in ids.items() if n_rows > 1}
