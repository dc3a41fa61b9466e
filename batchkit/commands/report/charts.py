"""Charts as inline SVG. The SVG holds only shapes, so that it may be stretched to any width; the
labels around it are HTML, which keeps its size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from markupsafe import Markup

from batchkit.commands.report.figures import (
    Histogram,
    RunStats,
    Timeline,
    histogram,
    nice,
)
from batchkit.config.numbers import clock, duration, number

_HEIGHT = 100.0
_HIT = Markup('<rect class="hit" x="{}" y="0" width="1" height="100"><title>{}</title></rect>')
_BAR = Markup('<rect class="bar" x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}"/>')


class Chart(NamedTuple):
    """``y_top``: the value at the upper edge. ``x_labels``: spread evenly below it."""

    title: str
    note: str
    svg: Markup
    y_top: str
    x_labels: list[str]


def charts(stats: RunStats, line: Timeline | None) -> list[Chart]:
    """All charts that this run's records allow."""
    found = []
    if line is not None:
        rate = f"{number(line.mean_rows_per_s)} rows/s over {duration(line.seconds)} of work"
        mean = sum(line.in_flight) / len(line.in_flight)
        at_once = f"{number(mean)} on average, {line.most_in_flight:,} at most"
        found.append(_over_time("Throughput", rate, line.rows_per_s, line, "rows/s"))
        found.append(_over_time("Requests in flight", at_once, line.in_flight, line, "requests"))
    spreads = (
        ("Latency", histogram(stats.latency_s), "s"),
        ("Prompt tokens", histogram(stats.prompt_tokens), ""),
        ("Completion tokens", histogram(stats.completion_tokens), ""),
    )
    return found + [_spread(title, spread, unit) for title, spread, unit in spreads if spread]


def bar(share: float) -> Markup:
    """A bar filled to ``share``, from 0 to 1."""
    width = 100 * min(1.0, max(0.0, share))
    return Markup(
        '<svg class="meter" viewBox="0 0 100 1" preserveAspectRatio="none" aria-hidden="true">'
        '<rect class="track" width="100" height="1"/>'
        '<rect class="fill" width="{:.2f}" height="1"/></svg>'
    ).format(width)


def shares(counts: Mapping[str, int]) -> list[tuple[str, int, Markup]]:
    """Name, count and a bar relative to the largest, the largest first."""
    most = max(counts.values(), default=1)
    ordered = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    return [(name, count, bar(count / most)) for name, count in ordered]


def _over_time(title: str, note: str, values: Sequence[float], line: Timeline, unit: str) -> Chart:
    top = nice(max(values))
    n = len(values)
    heights = [_HEIGHT - _HEIGHT * value / top for value in values]
    steps = " ".join(f"{x},{y:.2f} {x + 1},{y:.2f}" for x, y in enumerate(heights))
    pauses = [
        Markup('<line class="pause" x1="{0:.2f}" x2="{0:.2f}" y1="0" y2="100"/>').format(at * n)
        for at, _ in line.pauses
    ]
    width_s = line.seconds / n
    hits = [
        _HIT.format(x, f"{number(value, unit)} after {clock(x * width_s)}")
        for x, value in enumerate(values)
    ]
    if line.pauses:
        paused = duration(sum(length for _, length in line.pauses))
        times = len(line.pauses)
        note += f"; {times} pause{'s' * (times > 1)} ({paused}) cut out"
    shapes = Markup('<polygon class="area" points="0,100 {0} {1},100"/>').format(steps, n)
    edge = Markup('<polyline class="edge" points="{}"/>').format(steps)
    svg = _svg(f"{title}: {note}", n, [shapes, edge, *pauses, *hits])
    ticks = [clock(line.seconds * part / 4) for part in range(5)]
    return Chart(title, note, svg, number(top, unit), ticks)


def _spread(title: str, spread: Histogram, unit: str) -> Chart:
    most = max(spread.counts)
    top = nice(most)
    bars, hits = [], []
    for x, count in enumerate(spread.counts):
        height = _HEIGHT * count / top
        if count:
            height = max(height, 1.0)  # one row among a million stays visible
            bars.append(_BAR.format(x + 0.08, _HEIGHT - height, 0.84, height))
        low = number(spread.low + x * spread.width)
        high = number(spread.low + (x + 1) * spread.width, unit)
        more = " and more" if spread.overflow and x == len(spread.counts) - 1 else ""
        hits.append(_HIT.format(x, f"{low}–{high}{more}: {count:,} rows"))
    note = (
        f"median {number(spread.median, unit)}, 99th percentile {number(spread.p99, unit)},"
        f" largest {number(spread.largest, unit)}"
    )
    ticks = [number(spread.low + (spread.top - spread.low) * part / 4) for part in range(5)]
    ticks[-1] = f"{ticks[-1]}{' +' if spread.overflow else ''} {unit}".rstrip()
    svg = _svg(f"{title}: {note}", len(spread.counts), [*bars, *hits])
    return Chart(title, note, svg, number(top, "rows"), ticks)


def _svg(label: str, width: float, shapes: Sequence[Markup]) -> Markup:
    grid = Markup("").join(
        Markup('<line class="grid" x1="0" x2="{0}" y1="{1}" y2="{1}"/>').format(width, y)
        for y in (0, 50, 100)
    )
    return Markup(
        '<svg role="img" aria-label="{}" viewBox="0 0 {} 100" preserveAspectRatio="none">{}{}</svg>'
    ).format(label, width, grid, Markup("").join(shapes))
