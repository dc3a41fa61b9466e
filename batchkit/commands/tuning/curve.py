"""The throughput curve as one page that needs no network: an inline SVG, and the table below it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from batchkit.commands.tuning.batch_size import KEY
from batchkit.commands.tuning.table import Line, SizeTable
from batchkit.commands.view.page import policy, style
from batchkit.config.numbers import nice, number
from batchkit.errors import JobError
from batchkit.storage.files import replacing

WIDTH, HEIGHT = 720.0, 330.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 16.0, 28.0, 52.0


def write_curve(table: SizeTable, path: Path) -> None:
    """Raises:
    JobError: ``path`` can't be written.
    """
    lines = table.lines
    top = nice(max((each["rows_per_s"] for line in lines for each in line["rounds"]), default=1.0))
    step = (WIDTH - _LEFT - _RIGHT) / max(1, len(lines))
    # Spaced evenly, because batch sizes mostly double from one to the next.
    points = [_point(line, _LEFT + step * (n + 0.5), top) for n, line in enumerate(lines)]
    environment = Environment(
        loader=PackageLoader("batchkit", "commands/tuning"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    page = environment.get_template("curve.html.j2").render(
        policy=Markup(policy(style())),
        style=Markup(style()),
        bench=table,
        option=KEY,
        points=points,
        path=" ".join(f"{p['x']:.1f},{p['y']:.1f}" for p in points if p["y"] is not None),
        ticks=[(_y(top * part / 4, top), number(top * part / 4)) for part in range(5)],
        width=WIDTH,
        height=HEIGHT,
        left=_LEFT,
        right=WIDTH - _RIGHT,
        bottom=HEIGHT - _BOTTOM,
    )
    try:
        with replacing(path) as temporary:
            temporary.write_text(page, encoding="utf-8")
    except OSError as error:
        raise JobError(f"--html {path}: can't be written: {error.strerror}") from error


def _point(line: Line, x: float, top: float) -> dict[str, Any]:
    """A batch size on the page, for the template; ``y`` is None if it did not run."""
    point = {
        "x": x,
        "size": line["batch_size"],
        "y": None,
        "label": line["status"].partition(":")[0],
    }
    if rates := [each["rows_per_s"] for each in line["rounds"]]:
        y, low, high = (_y(rate, top) for rate in (line["rows_per_s"], min(rates), max(rates)))
        output = number(line["completion_tokens_per_s"])
        label = f"{number(line['rows_per_s'])} rows/s, {output} output tokens/s"
        point |= {"y": y, "y_low": low, "y_high": high, "label": label}
    return point


def _y(rate: float, top: float) -> float:
    return HEIGHT - _BOTTOM - (HEIGHT - _BOTTOM - _TOP) * rate / top
