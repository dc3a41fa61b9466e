"""Scores predictions that were made elsewhere, against the rows of a job's input."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from batchkit.commands.score.answer import Answered, Say
from batchkit.commands.score.deferred import deferred_scores
from batchkit.commands.score.job import check_scoring
from batchkit.commands.score.prediction_file import Prediction, read_predictions
from batchkit.config.tables import JobConfig
from batchkit.errors import JobError
from batchkit.execution.first_rows import scoring_hints
from batchkit.execution.signals import StopRequest
from batchkit.scoring import Scored, Scoring
from batchkit.scoring.metrics import ScoreTable, tabulate
from batchkit.sources import read_rows
from batchkit.storage.score_store import references_of
from batchkit.types import Row


class PredictionScores(NamedTuple):
    """The table of predictions; ``missing`` rows of the input have none."""

    table: ScoreTable
    missing: int

    def to_json(self) -> dict[str, Any]:
        return {**self.table.to_json(), "missing": self.missing}

    def to_text(self) -> str:
        text = self.table.to_text()
        if self.missing:
            text += f"\n\n{self.missing:,} rows of the input have no prediction"
        return text


def score_predictions(job: JobConfig, path: Path, say: Say = print) -> PredictionScores:
    """Score the predictions in ``path`` against the rows of ``job``'s input, found by id.

    Judgements are kept beside ``path``, in the folder ``<its name>.judge``.

    Raises:
        JobError: nothing is scored; the file can't be read; none of its ids is in the input.
    """
    check_scoring(job)
    scoring = Scoring(job.scoring, references_of(job), say)
    made = read_predictions(path)
    rows = _rows_by_id(job)
    if not rows.keys() & made.keys():
        raise JobError(
            f"{path}: none of its {len(made):,} ids is an id of the job's input"
            f" (first there: {next(iter(made), None)!r}, here: {next(iter(rows), None)!r});"
            " set input.id to the field that names a row"
        )
    if strangers := made.keys() - rows.keys():
        say(f"{len(strangers):,} predictions have no row in the input, as id {min(strangers)!r}")
    for hint in scoring_hints(job.scoring, next(iter(rows.values())).fields):
        say(hint)
    known = [(rows[name], made[name]) for name in rows if name in made]
    answers = [
        Answered(row.index, row.id, row.fields, found.text or found.prediction or "", scored)
        for row, found in known
        if not found.failed
        for scored in [_of_prediction(scoring, found, row.fields, row.id)]
    ]
    with StopRequest().installed() as stop:
        judgements = path.with_name(f"{path.name}.judge")
        later = deferred_scores(job, scoring, answers, judgements, stop, say)
    records: list[dict[str, Any]] = [
        {
            "status": "ok",
            "fields": a.fields,
            "scores": {**a.known.scores, **later.get(a.index, {})},
            "unscored": a.known.unscored,
        }
        for a in answers
    ]
    records += [{"status": "failed", "fields": row.fields} for row, found in known if found.failed]
    return PredictionScores(tabulate(records, job.scoring.group_by), len(rows) - len(known))


def _rows_by_id(job: JobConfig) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for row in read_rows(job.input):
        if row.error is not None:
            continue
        if (other := rows.setdefault(row.id, row)) is not row:
            raise JobError(
                f"{job.input.path}: id {row.id!r} names rows {other.index} and {row.index}, so a"
                " prediction may be for either; set input.id to a field that names one row"
            )
    return rows


def _of_prediction(
    scoring: Scoring, found: Prediction, fields: Mapping[str, Any], row_id: str
) -> Scored:
    if found.prediction is None:
        return scoring.score(found.text or "", fields, row_id)
    return scoring.score_prediction(found.prediction, fields, row_id)
