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
    """Return the fields in the templates of the chart's type and table."""
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
    """Run the code of all charts, if ``scoring.allow_code`` permits it, and return their scores by row index.

    - ``chart_type``: template of the chart's type. Its first word is LineChart, BarChart, ScatterChart or PieChart.
    - ``table``: template of the path of the file that the code reads, under ``media.root``. The file is opened after
      its path is checked, so no other user may have write access below ``media.root``.
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
    except SandboxError as error:  # the kernel has no sandbox, so no chart program can run
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
    """Return the template of the chart's type and, if there is one, that of its table's path."""
    given = {"chart_type": chart_type, "table": table}
    return [
        RowTemplate(job, f"scoring.scorers.chart.{name}", template)
        for name, template in given.items()
        if template is not None
    ]


def _below_root(job: JobConfig, path: str) -> Path | None:
    """Return the file at ``path`` below ``media.root``. Return None if it does not exist or is outside the root."""
    root = Path(job.media.root).resolve()
    found = (root / path).resolve()
    return found if found.is_file() and found.is_relative_to(root) else None
