"""The table of the scores that a run has."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from batchkit.config.tables import JobConfig
from batchkit.runs.index import Snapshot, Table
from batchkit.runs.inputs import with_fields
from batchkit.runs.reach import Reach
from batchkit.scoring.metrics import OUT_OF_TEN, Group, ScoreTable, in_order, tabulate
from batchkit.storage.checkpoint import check_log
from batchkit.storage.job_toml import job_of_run
from batchkit.storage.manifest import read_manifest
from batchkit.storage.score_store import read_scored


def table_of(folder: Path, job: JobConfig | None = None, media: Sequence[Path] = ()) -> ScoreTable:
    """By group, as ``job`` says, else the run's own, with what a reader may open.

    Raises:
        InputError: the table needs fields that the run did not keep, and the input changed.
        StoreError: its results are missing or damaged.
    """
    check_log(folder)
    reach = Reach.of(folder, media) if job is None else None
    job = job or job_of_run(folder)
    group_by = job.scoring.group_by
    names = set() if group_by is None else {group_by}
    pairs = with_fields(read_scored(folder), job, names, reach)
    return tabulate(({**record, "fields": fields} for record, fields in pairs), group_by)


def table_of_index(snapshot: Snapshot, group_by: str | None) -> ScoreTable:
    """The table of scores, from the index."""
    is_ok, scores = snapshot.entries["is_ok"][snapshot.newest], snapshot.scores[snapshot.newest]
    groups: dict[str, Group] = {}
    if group_by is not None:
        of_rows = snapshot.entries["group"][snapshot.newest]
        order = np.argsort(of_rows, kind="stable")
        bounds = np.searchsorted(of_rows[order], np.arange(len(snapshot.groups) + 1))
        for number, name in enumerate(snapshot.groups):
            places = order[bounds[number] : bounds[number + 1]]
            if len(places):
                groups[name] = _group(is_ok[places], scores[places], snapshot.scorers)
    overall = _group(is_ok, scores, snapshot.scorers)
    return ScoreTable(dict(sorted(groups.items())), overall, in_order(snapshot.scorers))


def is_mixed(folder: Path) -> bool:
    """True if some of a run's rows may have been scored in another way than others.

    This is so after a change of ``[scoring]``, until the next complete `run` or `score`.
    """
    return read_manifest(folder).scoring is None


def _group(is_ok: Table, scores: Table, scorers: Sequence[str]) -> Group:
    has_score = ~np.isnan(scores)
    is_scored = is_ok & has_score.any(axis=1)
    found = Group(int(is_scored.sum()), int((is_ok & ~is_scored).sum()), int((~is_ok).sum()))
    for column, name in enumerate(scorers):
        values = scores[is_ok & has_score[:, column], column]
        scaled = values if name in OUT_OF_TEN else values * 100
        found.scores[name] = array("d", scaled.tobytes())
    return found
