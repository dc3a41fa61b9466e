"""Deferred scores: those that need more than a record. Charts run in a sandbox, and a second model gives judgements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from batchkit.commands import Say
from batchkit.commands.score.judge import NAMES, Answered, judge, judged_by_step, names_read
from batchkit.config.tables import JobConfig
from batchkit.errors import RowError
from batchkit.execution.stop import StopRequest
from batchkit.rendering.templates import RowTemplate
from batchkit.rendering.templates.prompt import names_in
from batchkit.scoring import DEFERRED, Scoring


def is_deferred(scorers: Iterable[str]) -> bool:
    return any(name in DEFERRED for name in scorers)


def deferred_scores(
    job: JobConfig,
    scoring: Scoring,
    answers: Iterable[Answered],
    judgements: Path,
    stop: StopRequest,
    say: Say,
) -> dict[int, dict[str, float | None]]:
    """Return the deferred scores of ``answers``, by row index and scorer. ``judgements`` is the folder that stores
    judgements."""
    found: dict[int, dict[str, float | None]] = {}
    charts: list[Answered] = []
    judged: list[Answered] = []
    for answered in answers:
        scorers = scoring.table_for(answered.fields).scorers
        charts += [answered] if "chart" in scorers else []
        judged += [answered] if "judge" in scorers else []
    if charts and not job.scoring.allow_code:
        say(f"{len(charts):,} charts are unscored: set scoring.allow_code = true to run their code")
    elif charts:
        say(f"running the code of {len(charts):,} charts")
        found.update(_charts(job, scoring, charts, say))
    if judged and job.scoring.judge is None:
        say(f"{len(judged):,} answers are not judged: set a model or a step in [scoring.judge]")
    elif judged and job.scoring.judge is not None:
        if job.scoring.judge.step is None:
            scores = judge(job, scoring, job.scoring.judge, judged, judgements, stop, say)
        else:
            scores = judged_by_step(job, job.scoring.judge, judged, say)
        for index, score in scores.items():
            found.setdefault(index, {})["judge"] = score
    return found


def _charts(
    job: JobConfig, scoring: Scoring, answers: Iterable[Answered], say: Say
) -> Iterator[tuple[int, dict[str, float | None]]]:
    from batchkit.scoring.chart import Chart, score_charts
    from batchkit.scoring.chart.sandbox import SandboxError

    kind = RowTemplate(job, "scoring.chart_type", job.scoring.chart_type)
    table = job.scoring.table
    where = None if table is None else RowTemplate(job, "scoring.table", table)
    charts: dict[int, Chart] = {}
    for answered in answers:
        try:
            charts[answered.index] = Chart(
                response=answered.text,
                chart_type=kind.text(answered.fields).partition(" ")[0],
                reference=scoring.reference(answered.fields, answered.id) or "",
                table=None if where is None else _below_root(job, where.text(answered.fields)),
            )
        except RowError as error:
            say(f"row {answered.id}: its chart is unscored: {error}")
    try:
        results = score_charts(list(charts.values()), mode=job.scoring.mode)
    except SandboxError as error:  # the kernel has no sandbox, so no chart program can run
        say(f"charts are unscored: {error}")
        return
    for index, chart in zip(charts, results, strict=True):
        passed = None if chart.passed is None else float(chart.passed)
        yield index, {"ecr": float(chart.ecr), "pass": passed}


def _below_root(job: JobConfig, path: str) -> Path | None:
    """Return the file at ``path`` below ``media.root``. Return None if it does not exist or is outside the root."""
    root = Path(job.media.root).resolve()
    found = (root / path).resolve()
    return found if found.is_file() and found.is_relative_to(root) else None


def names_of_deferred(job: JobConfig, scoring: Scoring) -> set[str]:
    """Return the names that the templates for charts and for the judge use. They are fields of the row, or names in
    ``[vars]`` if the row has no such field."""
    templates: list[str] = []
    if "chart" in scoring.scorers and job.scoring.allow_code:
        templates += [job.scoring.chart_type, job.scoring.table or ""]
    names = names_in(job.model_copy(update={"vars": {}}), None, templates)
    if "judge" in scoring.scorers and job.scoring.judge is not None:
        names |= names_read(job, job.scoring.judge) - set(NAMES)
    return names
