"""The throughput curve as one page that needs no network: an inline SVG, and the table below it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from batchkit.commands.tuning.bench import FEW_ROUNDS, few_rounds
from batchkit.commands.tuning.table import SizeResult, SizeTable
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
    top = nice(max((found.rows_per_s for line in lines for found in line.rounds), default=1.0))
    rounds = [len(line.rounds) for line in lines if line.rounds]
    step = (WIDTH - _LEFT - _RIGHT) / max(1, len(lines))
    # Spaced evenly, because batch sizes mostly double from one to the next.
    points = [_point(line, _LEFT + step * (n + 0.5), top) for n, line in enumerate(lines)]
    environment = Environment(
        loader=PackageLoader("batchkit", "commands/tuning"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters["number"] = number
    pieces = environment.get_template("curve.html.j2").generate(
        policy=Markup(policy(style())),
        style=Markup(style()),
        bench=table,
        lines=lines,
        points=points,
        doubts=[*table.doubts(), *few_rounds(min(rounds, default=FEW_ROUNDS))],
        path=" ".join(f"{p['x']:.1f},{p['y']:.1f}" for p in points if p["y"] is not None),
        ticks=[(_y(top * part / 4, top), number(top * part / 4)) for part in range(5)],
        width=WIDTH,
        height=HEIGHT,
        left=_LEFT,
        right=WIDTH - _RIGHT,
        bottom=HEIGHT - _BOTTOM,
    )
    try:
        with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
            file.writelines(pieces)
    except OSError as error:
        raise JobError(f"--html {path}: can't be written: {error.strerror}") from error


def _point(line: SizeResult, x: float, top: float) -> dict[str, Any]:
    """A batch size on the page, for the template; ``y`` is None if it did not run."""
    rates = [found.rows_per_s for found in line.rounds]
    if not rates or line.rows_per_s is None:
        label = line.status.partition(":")[0]
        text = f"{line.batch_size}: {label}"
        return {"x": x, "y": None, "size": line.batch_size, "label": label, "text": text}
    output = number(line.median("completion_tokens_per_s") or 0.0)
    label = f"{number(line.rows_per_s)} rows/s, {output} output tokens/s"
    y, y_low, y_high = (_y(rate, top) for rate in (line.rows_per_s, min(rates), max(rates)))
    return {
        "x": x,
        "y": y,
        "y_low": y_low,
        "y_high": y_high,
        "size": line.batch_size,
        "label": label,
        "text": f"{line.batch_size}: {label}",
    }


def _y(rate: float, top: float) -> float:
    return HEIGHT - _BOTTOM - (HEIGHT - _BOTTOM - _TOP) * rate / top
