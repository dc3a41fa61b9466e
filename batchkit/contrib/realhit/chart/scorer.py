"""The scorer ``chart``: ``ecr`` is 1 if the code of a chart ran, ``pass`` is 1 if it drew the right values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from batchkit import JobConfig
from batchkit.contrib.realhit.chart import Chart, score_charts
from batchkit.contrib.realhit.chart.sandbox import SandboxError
from batchkit.errors import RowError
from batchkit.rendering.templates import RowTemplate
from batchkit.scoring.deferred import Answered

scores = ("ecr", "pass")


def fields(job: JobConfig, *, chart_type: str, table: str | None) -> set[str]:
    """Return the row fields that the templates ``chart_type`` and ``table`` use. Return an empty set if
    ``scoring.allow_code`` is false."""
    if not job.scoring.allow_code:
        return set()
    return set[str]().union(*(made.names for made in _templates(job, chart_type, table)))


def score(
    job: JobConfig,
    answers: Sequence[Answered],
    say: Callable[[str], None],
    *,
    chart_type: str = "{{ SubQType }}",
    table: str | None = None,
) -> dict[int, dict[str, float | None]]:
    """Run the code of all charts, and return their scores by row index. If ``scoring.allow_code`` is false, no code is
    run and nothing is scored.

    - ``chart_type``: template of the chart's type. The first word of the rendered text is LineChart, BarChart,
      ScatterChart or PieChart.
    - ``table``: template of the path of the file that the code reads, under ``media.root``. No other user must have
      write access below ``media.root``, because the file could be replaced between the check of its path and its use.
    """
    if not job.scoring.allow_code:
        say(
            f"{len(answers):,} charts are unscored: set scoring.allow_code = true to run their code"
        )
        return {}
    say(f"running the code of {len(answers):,} charts")
    kind, *path = _templates(job, chart_type, table)
    charts: dict[int, Chart] = {}
    for answer in answers:
        try:
            charts[answer.index] = Chart(
                response=answer.text,
                chart_type=kind.text(answer.fields).partition(" ")[0],
                reference=answer.reference or "",
                table=_below_root(job, path[0].text(answer.fields)) if path else None,
            )
        except RowError as error:
            say(f"row {answer.id}: its chart is unscored: {error}")
    try:
        results = score_charts(
            list(charts.values()), mode="official" if job.scoring.mode == "official" else "fixed"
        )
    except SandboxError as error:  # this machine can't confine code, so no chart is run
        say(f"charts are unscored: {error}")
        return {}
    return {
        index: {
            "ecr": float(found.ecr),
            "pass": None if found.passed is None else float(found.passed),
        }
        for index, found in zip(charts, results, strict=True)
    }


def _templates(job: JobConfig, chart_type: str, table: str | None) -> list[RowTemplate]:
    """Return the template of the chart's type and, if ``table`` is not None, the template of the table's path."""
    given = {"chart_type": chart_type, "table": table}
    return [
        RowTemplate(job, f"scoring.scorers.chart.{name}", template)
        for name, template in given.items()
        if template is not None
    ]


def _below_root(job: JobConfig, path: str) -> Path | None:
    """Return the absolute path of the file at ``path`` below ``media.root``; None if the file does not exist or is
    outside the root."""
    root = Path(job.media.root).resolve()
    found = (root / path).resolve()
    return found if found.is_file() and found.is_relative_to(root) else None
