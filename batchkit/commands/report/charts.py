"""Charts as inline SVG. The SVG holds only shapes, so that it may be stretched to any width; the
labels around it are HTML, which keeps its size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from markupsafe import Markup

from batchkit.commands.report.figures import (
    FEW_BINS,
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
    """``y_top``: the value at the upper edge. ``x_labels``: spread evenly below it, from edge to edge;
    or, if ``labels_bars``, one in the middle of each bar."""

    title: str
    note: str
    svg: Markup
    y_top: str
    x_labels: list[str]
    labels_bars: bool = False


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
    top, n = nice(max(spread.counts)), len(spread.counts)
    filled = min(0.84, n / 6)  # of a bar's place: a single one does not fill the chart
    bars, hits = [], []
    for x, count in enumerate(spread.counts):
        height = _HEIGHT * count / top
        if count:
            height = max(height, 1.0)  # one row among a million stays visible
            bars.append(_BAR.format(x + (1 - filled) / 2, _HEIGHT - height, filled, height))
        more = " and more" if spread.overflow and x == n - 1 else ""
        hits.append(_HIT.format(x, f"{_range(spread, x, unit)}{more}: {count:,} rows"))
    note = (
        f"median {number(spread.median, unit)}, 99th percentile {number(spread.p99, unit)},"
        f" largest {number(spread.largest, unit)}"
    )
    if spread.is_constant:
        note = f"all {number(spread.largest, unit)}"
    labels_bars = spread.is_whole and n <= FEW_BINS
    if labels_bars:
        ticks = [number(spread.low + x) for x in range(n)]
    else:
        ticks = [number(spread.low + (spread.top - spread.low) * part / 4) for part in range(5)]
    ticks[-1] = f"{ticks[-1]}{' +' if spread.overflow else ''} {unit}".rstrip()
    svg = _svg(f"{title}: {note}", n, [*bars, *hits])
    return Chart(title, note, svg, number(top, "rows"), ticks, labels_bars)


def _range(spread: Histogram, x: int, unit: str) -> str:
    """The values that bin ``x`` counts."""
    low, high = (spread.low + n * spread.width for n in (x, x + 1))
    if not spread.is_whole:
        return f"{number(low)}–{number(high, unit)}"
    return number(low, unit) if spread.width == 1 else f"{number(low)}–{number(high - 1, unit)}"


def _svg(label: str, width: float, shapes: Sequence[Markup]) -> Markup:
    grid = Markup("").join(
        Markup('<line class="grid" x1="0" x2="{0}" y1="{1}" y2="{1}"/>').format(width, y)
        for y in (0, 50, 100)
    )
    return Markup(
        '<svg role="img" aria-label="{}" viewBox="0 0 {} 100" preserveAspectRatio="none">{}{}</svg>'
    ).format(label, width, grid, Markup("").join(shapes))
