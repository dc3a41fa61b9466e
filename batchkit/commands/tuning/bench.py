"""``batchkit bench``: measures the requested batch sizes side by side, in several rounds.

Its page needs no network: an inline SVG, and the table below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from batchkit.commands import Say
from batchkit.commands.trial import trials_of
from batchkit.commands.tuning.batch_size import KEY, most_of
from batchkit.commands.tuning.table import Line, Sizes, SizeTable
from batchkit.commands.view.page import policy, style
from batchkit.config.numbers import nice, number
from batchkit.config.tables import JobConfig
from batchkit.errors import JobError
from batchkit.storage.files import replacing

WIDTH, HEIGHT = 720.0, 330.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 16.0, 28.0, 52.0
FEW_ROUNDS = 3  # with fewer, the spread means little


def sizes_in(text: str) -> list[int]:
    """``1,4,8`` as numbers, without duplicates.

    Raises:
        JobError: it is not a list of whole numbers from 1 on.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise JobError(f"--batch-sizes {text}: write whole numbers from 1 on, as in 1,4,8")
    return list(dict.fromkeys(map(int, parts)))


def bench(
    job: JobConfig,
    batch_sizes: Sequence[int],
    *,
    rounds: int,
    rows: int | None,
    seconds: float,
    say: Say = lambda text: None,
) -> SizeTable:
    """Measure each of ``batch_sizes`` for ``rounds`` rounds of at most ``seconds`` s.

    Each round has its own engine, and the sizes take turns, so that a disturbance of the machine
    affects all of them. A size that failed is not tried again.

    Raises:
        JobError: the job itself is invalid, or its input has no rows.
    """
    sizes, failed = Sizes(job, say), set[int]()
    if rounds < FEW_ROUNDS:
        say(f"with --rounds {rounds} a difference may be chance; give --rounds {FEW_ROUNDS}")
    with trials_of(job, rows) as trials:
        most, why = most_of(job, trials.rows)
        for size in batch_sizes:
            if size > most:
                say(f"batch size {size:,} is never full: {why}")
        for _ in range(rounds):
            for size in batch_sizes:
                if size not in failed and sizes.run(trials, size, seconds).figures is None:
                    failed.add(size)
    return sizes.table(trials.signum)


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
