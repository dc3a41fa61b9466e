"""Scores existing answers: those of a run again, or predictions that were made elsewhere.

The scores of a run's records are in ``results.jsonl``, computed as the rows finished; scores
computed here replace them (``storage/score_store.py``). Charts and judgements, which need a sandbox
or a second model, are scored only here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from batchkit.commands.score.judge import FOLDER, NAMES, ScoredAnswer, judge, names_read
from batchkit.commands.score.predictions import Prediction, read_predictions
from batchkit.config.tables import JobConfig
from batchkit.errors import InputError, JobError, RowError
from batchkit.execution.hints import scoring_hints
from batchkit.execution.signals import StopRequest
from batchkit.rendering.templates.prompt import PathTemplate, names_in
from batchkit.scoring import DEFERRED, Scored, Scoring, scorers_of
from batchkit.scoring.metrics import ScoreTable, tabulate
from batchkit.sources import read_rows
from batchkit.sources.join import with_fields
from batchkit.storage.checkpoint import check_log
from batchkit.storage.identity import scoring_of
from batchkit.storage.job_toml import job_of_run, write_job
from batchkit.storage.ledger import RESULTS, read_newest
from batchkit.storage.manifest import read_manifest
from batchkit.storage.runfolder import claim
from batchkit.storage.score_store import SCORES, ScoreLine, read_scored, references_of, write_scores
from batchkit.types import Row

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Answered:
    """An answer with its row, and the scores that could be computed at once."""

    index: int
    id: str
    fields: Mapping[str, Any]
    text: str
    known: Scored


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


def score_run(
    folder: Path, job: JobConfig | None = None, *, stop: StopRequest | None = None, say: Say = print
) -> ScoreTable:
    """Score every answer of a run again, as ``job.scoring`` says, and store the scores.

    Without ``job``: the run's own. Judgements that the run already has are not requested again.

    Raises:
        JobError: nothing is scored, or the rows that the scoring needs are missing.
        StoreError: another process works on the run, or its results are missing.
    """
    with ExitStack() as held:
        stop = stop or held.enter_context(StopRequest().installed())
        held.enter_context(claim(folder))
        return _score_run(folder, job or job_of_run(folder), stop, say)


def finish_scoring(
    folder: Path, job: JobConfig, *, stop: StopRequest, say: Say
) -> ScoreTable | None:
    """Compute the scores left when a run has ended; its table, or None if nothing is scored."""
    if not job.scoring.is_on:
        return None
    if not is_scored(folder, job):
        with claim(folder):
            return _score_run(folder, job, stop, say)
    return table_of(folder, job)


def is_scored(folder: Path, job: JobConfig) -> bool:
    """True if the run has every score that ``job.scoring`` asks for."""
    if _is_other(folder, job):
        return False
    now = scored_from(folder, job)
    return not now or read_manifest(folder).scored_from == now


def scored_from(folder: Path, job: JobConfig) -> list[list[int]]:
    """Size and time of each file that scores depend on after the rows have finished.

    They are compared for equality: which file is older says nothing if a clock was set.
    """
    made_from = [folder / RESULTS] if _is_deferred(scorers_of(job.scoring)) else []
    if job.scoring.reference_run is not None:  # it may run while this one does
        reference = Path(job.scoring.reference_run)
        made_from = [folder / RESULTS, reference / RESULTS, reference / SCORES]
    found = [path.stat() if path.exists() else None for path in made_from]
    return [[0, 0] if stat is None else [stat.st_size, stat.st_mtime_ns] for stat in found]


def table_of(folder: Path, job: JobConfig | None = None) -> ScoreTable:
    """The table of the scores that a run has.

    Raises:
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


def score_predictions(job: JobConfig, path: Path, say: Say = print) -> PredictionScores:
    """Score the predictions in ``path`` against the rows of ``job``'s input, found by id.

    Judgements are kept beside ``path``, in the folder ``<its name>.judge``.

    Raises:
        JobError: nothing is scored; the file can't be read; none of its ids is in the input.
    """
    _check(job)
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
        _Answered(row.index, row.id, row.fields, found.text or found.prediction or "", scored)
        for row, found in known
        if not found.failed
        for scored in [_of_prediction(scoring, found, row.fields, row.id)]
    ]
    with StopRequest().installed() as stop:
        judgements = path.with_name(f"{path.name}.judge")
        later = _deferred(job, scoring, answers, judgements, stop, say)
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


def _score_run(folder: Path, job: JobConfig, stop: StopRequest, say: Say) -> ScoreTable:
    _check(job)
    check_log(folder)
    for hint in scoring_hints(job.scoring, _first_row(job)):
        say(hint)
    made_from = scored_from(folder, job)
    scoring = Scoring(job.scoring, references_of(job), say)
    names = scoring.fields | _names_of_deferred(job, scoring)
    later: dict[int, dict[str, float | None]] = {}
    if _is_deferred(scoring.scorers):
        needs_later = [
            _answered(record, fields, scoring)
            for record, fields in _answers(folder, job, names)
            if _is_deferred(scoring.table_for(fields).scorers)
        ]
        later = _deferred(job, scoring, needs_later, folder / FOLDER, stop, say)

    def lines() -> Iterator[ScoreLine]:
        for record, fields in _answers(folder, job, names):
            index, scored = record["index"], scoring.score(record["text"], fields, record["id"])
            yield ScoreLine(
                index,
                record.get("input_hash"),
                record["finished_at"],
                scored.prediction,
                {**scored.scores, **later.get(index, {})},
                scored.unscored,
            )

    write_scores(folder, lines(), before=lambda: _forget(folder, job))
    _remember(folder, job, made_from)
    return table_of(folder, job)


def _first_row(job: JobConfig) -> Mapping[str, Any] | None:
    """The fields of the input's first row; None if it can no longer be read."""
    if job.input.path is None:
        return None
    try:
        row = next(read_rows(job.input), None)
    except InputError:  # the kept fields may be enough
        return None
    return None if row is None or row.error is not None else row.fields


def _answers(
    folder: Path, job: JobConfig, names: set[str]
) -> Iterator[tuple[dict[str, Any], Mapping[str, Any]]]:
    """The newest ok record of each row, and the row's fields."""
    ok = (record for record in read_newest(folder / RESULTS) if record["status"] == "ok")
    return with_fields(ok, job, names)


def _answered(record: Mapping[str, Any], fields: Mapping[str, Any], scoring: Scoring) -> _Answered:
    text, row_id = record["text"], record["id"]
    return _Answered(record["index"], row_id, fields, text, scoring.score(text, fields, row_id))


def _is_deferred(scorers: Iterable[str]) -> bool:
    return any(name in DEFERRED for name in scorers)


def _deferred(
    job: JobConfig,
    scoring: Scoring,
    answers: Iterable[_Answered],
    judgements: Path,
    stop: StopRequest,
    say: Say,
) -> dict[int, dict[str, float | None]]:
    """The scores that need more than the record, by the row's index; ``judgements``: a folder."""
    found: dict[int, dict[str, float | None]] = {}
    charts: list[_Answered] = []
    judged: list[_Answered] = []
    for answered in answers:
        scorers = scoring.table_for(answered.fields).scorers
        charts += [answered] if "chart" in scorers else []
        judged += [answered] if "judge" in scorers else []
    if charts and not job.scoring.allow_code:
        say(f"{len(charts):,} charts are unscored: scoring.allow_code = true runs their code")
    elif charts:
        say(f"running the code of {len(charts):,} charts")
        found.update(_charts(job, scoring, charts, say))
    if judged and job.scoring.judge is None:
        say(f"{len(judged):,} answers are not judged: [scoring.judge] names no model")
    elif judged and job.scoring.judge is not None:
        rows = [
            ScoredAnswer(a.index, a.id, a.fields, a.text, a.known.prediction, reference)
            for a in judged
            for reference in [scoring.reference(a.fields, a.id)]
        ]
        scores = judge(job, job.scoring.judge, rows, judgements, stop, say)
        for index, score in scores.items():
            found.setdefault(index, {})["judge"] = score
    return found


def _charts(
    job: JobConfig, scoring: Scoring, answers: Iterable[_Answered], say: Say
) -> Iterator[tuple[int, dict[str, float | None]]]:
    from batchkit.scoring.chart import Chart, SandboxError, score_charts

    kind = PathTemplate("scoring.chart_type", job.scoring.chart_type, job)
    table = job.scoring.table
    where = None if table is None else PathTemplate("scoring.table", table, job)
    charts: dict[int, Chart] = {}
    for answered in answers:
        try:
            charts[answered.index] = Chart(
                response=answered.text,
                chart_type=kind.render(answered.fields).partition(" ")[0],
                reference=scoring.reference(answered.fields, answered.id) or "",
                table=None if where is None else where.path(answered.fields),
            )
        except RowError as error:
            say(f"row {answered.id}: its chart is unscored: {error}")
    try:
        results = score_charts(list(charts.values()), mode=job.scoring.mode)
    except SandboxError as error:  # this kernel can't sandbox a program: none is run
        say(f"charts are unscored: {error}")
        return
    for index, chart in zip(charts, results, strict=True):
        passed = None if chart.passed is None else float(chart.passed)
        yield index, {"ecr": float(chart.ecr), "pass": passed}


def _of_prediction(
    scoring: Scoring, found: Prediction, fields: Mapping[str, Any], row_id: str
) -> Scored:
    if found.prediction is None:
        return scoring.score(found.text or "", fields, row_id)
    return scoring.score_prediction(found.prediction, fields, row_id)


def _names_of_deferred(job: JobConfig, scoring: Scoring) -> set[str]:
    """The fields that the templates for charts and the judge read."""
    templates: list[str] = []
    if "chart" in scoring.scorers and job.scoring.allow_code:
        templates += [job.scoring.chart_type, job.scoring.table or ""]
    names = names_in(job, None, templates)
    if "judge" in scoring.scorers and job.scoring.judge is not None:
        names |= names_read(job, job.scoring.judge) - set(NAMES)
    return names


def _check(job: JobConfig) -> None:
    if not job.scoring.is_on:
        raise JobError(
            "the job scores nothing: set [scoring] extract, reference and scorers, in the job file"
            " or by --set scoring.scorers='[\"em\"]' --set scoring.reference=FIELD"
        )


def _is_other(folder: Path, job: JobConfig) -> bool:
    """True if some rows of the run may have been scored in another way than ``job``'s."""
    return read_manifest(folder).scoring != scoring_of(job)


def _forget(folder: Path, job: JobConfig) -> None:
    """Mark the run as mixed before its scores are replaced, in case this is killed meanwhile."""
    if _is_other(folder, job):
        manifest = read_manifest(folder)
        manifest.scoring = None
        manifest.write(folder)


def _remember(folder: Path, job: JobConfig, made_from: list[list[int]]) -> None:
    write_job(folder, job_of_run(folder).model_copy(update={"scoring": job.scoring}))
    manifest = read_manifest(folder)
    manifest.scoring, manifest.scored_from = scoring_of(job), made_from
    manifest.write(folder)
