"""The table of the scores that a run has."""

from __future__ import annotations

from pathlib import Path

from batchkit.config.tables import JobConfig
from batchkit.runs.inputs import with_fields
from batchkit.scoring.metrics import ScoreTable, tabulate
from batchkit.storage.checkpoint import check_log
from batchkit.storage.job_toml import job_of_run
from batchkit.storage.manifest import read_manifest
from batchkit.storage.score_store import read_scored


def table_of(folder: Path, job: JobConfig | None = None) -> ScoreTable:
    """By group, as ``job`` says, else the run's own.

    Raises:
        InputError: the table needs fields that the run did not keep, and the input changed.
        StoreError: its results are missing or damaged.
    """
    check_log(folder)
    job = job or job_of_run(folder)
    group_by = job.scoring.group_by
    names = set() if group_by is None else {group_by}
    pairs = with_fields(read_scored(folder), job, names)
    return tabulate(({**record, "fields": fields} for record, fields in pairs), group_by)


def is_mixed(folder: Path) -> bool:
    """True if some of a run's rows may have been scored in another way than others.

    This is so after a change of ``[scoring]``, until the next complete `run` or `score`.
    """
    return read_manifest(folder).scoring is None
