"""The score table of a run."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from batchkit.config.tables import JobConfig
from batchkit.runs.index import Snapshot, Table
from batchkit.runs.inputs import with_fields
from batchkit.runs.reach import Reach
from batchkit.scoring.metrics import OUT_OF_TEN, Group, ScoreTable, in_order, tabulate
from batchkit.scoring.values import chosen
from batchkit.storage.checkpoint import check_log
from batchkit.storage.job_toml import job_of_run
from batchkit.storage.score_store import read_scored
from batchkit.storage.starts import read_history

_OTHER = "(other)"  # label in the confusion table for answers outside the choices


def table_of(folder: Path, job: JobConfig | None = None, media: Sequence[Path] = ()) -> ScoreTable:
    """Return the scores of a run by group. If answers are one of several choices, the table also has the confusion
    matrix.

    ``job``: decides groups and choices. By default the run's job, restricted to files that a reader may open.

    Raises:
        InputError: The table needs fields that the run did not keep, and the input changed.
        StoreError: The results are missing or damaged.
    """
    check_log(folder)
    reach = Reach.of(folder, media) if job is None else None
    job = job or job_of_run(folder)
    scoring, choices = job.scoring, _choices_of(job)
    names = {scoring.group_by or "", scoring.reference or ""} - {""}
    confusion = defaultdict[str, Counter[str]](Counter)
    wrong = list[tuple[str, str]]()

    def records() -> Iterator[dict[str, Any]]:
        for record, fields in with_fields(read_scored(folder), job, names, reach):
            if choices and record["status"] == "ok":
                right = chosen(str(fields.get(str(scoring.reference))), choices)
                found = chosen(record.get("prediction") or "", choices)
                confusion[right or _OTHER][found or _OTHER] += 1
            if not wrong and scoring.reference and (record.get("scores") or {}).get("em") == 0:
                wrong.append((str(record["prediction"]), str(fields.get(scoring.reference))))
            yield {**record, "fields": fields}

    table = tabulate(records(), scoring.group_by)
    return replace(table, confusion=confusion, first_wrong=next(iter(wrong), None))


def _choices_of(job: JobConfig) -> Sequence[str]:
    """Return the answers that the job allows (``scoring.choices`` or ``structured_outputs``). Return an empty tuple if
    there are none, or if the job has no ``scoring.reference`` or has ``scoring.rules``."""
    if job.scoring.reference is None or job.scoring.rules:
        return ()
    wanted = job.sampling.params().get("structured_outputs")
    constrained = wanted.get("choice") if isinstance(wanted, Mapping) and not job.steps else None
    return job.scoring.choices or constrained or ()


def table_of_index(snapshot: Snapshot, group_by: str | None) -> ScoreTable:
    """Return the score table, computed from the index."""
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
    """Return whether rows of the run may have been scored with different settings.

    This is the case after a change of ``[scoring]``, until the next complete `run` or `score`.
    """
    return read_history(folder).scoring is None


def _group(is_ok: Table, scores: Table, scorers: Sequence[str]) -> Group:
    has_score = ~np.isnan(scores)
    is_scored = is_ok & has_score.any(axis=1)
    found = Group(int(is_scored.sum()), int((is_ok & ~is_scored).sum()), int((~is_ok).sum()))
    for column, name in enumerate(scorers):
        values = scores[is_ok & has_score[:, column], column]
        scaled = values if name in OUT_OF_TEN else values * 100
        found.scores[name] = array("d", scaled.tobytes())
    return found
