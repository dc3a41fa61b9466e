"""The y values of a figure, read from pyplot."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any

Axes = Any  # matplotlib.axes.Axes
Reading = Callable[[Axes], Iterable[Any]]


def official_reading(pyplot: Any, chart_type: str) -> str:
    """Return the y values as the text that the official runner prints; "" if that runner would fail."""
    read = _OFFICIAL.get(chart_type)
    try:
        return "" if read is None else repr([*read(pyplot.gca())])
    except Exception:
        return ""


def fixed_readings(pyplot: Any, chart_type: str) -> list[str]:
    """Return the y values of all axes of the figure and, if these differ, also the y values that the official runner
    reads.

    Each of these is a JSON list with NaN for missing values. One that can't be read, or has no values, is left out.
    """
    numbers = pyplot.get_fignums()
    if not numbers or chart_type not in _FIXED:
        return []
    found = []
    # Read the current figure. If it has no values of this type, read the last figure that has some.
    for number in [pyplot.gcf().number, *reversed(numbers)]:
        values = _as_text(_FIXED[chart_type], pyplot.figure(number).axes)
        if values is not None:
            found.append(values)
            break
    current = _as_text(_OFFICIAL[chart_type], [pyplot.gca()])
    if current is not None and current not in found:
        found.append(current)
    return found


def _as_text(read: Reading, figure: list[Axes]) -> str | None:
    try:
        values = _plain(value for axes in figure for value in read(axes))
    except Exception:  # the figure has other artists than expected, or values that are not numbers
        return None
    return json.dumps(values) if any(value != [] for value in values) else None


def _plain(values: Iterable[Any]) -> list[Any]:
    """Return ``values`` with every number converted to float or int, also in nested lists. Missing values become
    NaN."""
    return [_plain(value) if isinstance(value, list) else _number(value) for value in values]


def _number(value: Any) -> float:
    if isinstance(value, str | bytes):
        raise TypeError(f"{value!r} is no number")
    if value is None or import_module("pandas").isna(value):  # masked, NA and NaT as well
        return math.nan
    if hasattr(value, "mask"):
        return math.nan
    number = float(value)
    return int(number) if isinstance(value, int) else number


def _lines(axes: Axes) -> Iterator[Any]:
    return (list(line.get_ydata()) for line in axes.get_lines())


def _heights(axes: Axes) -> Iterator[Any]:
    return (patch.get_height() for patch in axes.patches)


def _offsets(axes: Axes) -> Iterator[Any]:
    return ([point[1] for point in points.get_offsets()] for points in axes.collections)


def _fractions(axes: Axes) -> Iterator[Any]:
    return (round((patch.theta2 - patch.theta1) / 360.0, 2) for patch in axes.patches)


def _bars(axes: Axes) -> Iterator[Any]:
    container = import_module("matplotlib.container").BarContainer
    groups = [group for group in axes.containers if isinstance(group, container)]
    for group in groups:
        for bar in group:
            yield bar.get_width() if group.orientation == "horizontal" else bar.get_height()
    if not groups:
        yield from _heights(axes)


def _points(axes: Axes) -> Iterator[list[Any]]:
    points = import_module("matplotlib.collections").PathCollection
    for group in axes.collections:
        if isinstance(group, points):
            yield [point[1] for point in group.get_offsets()]
    for line in axes.get_lines():
        if line.get_linestyle() == "None" and line.get_marker() not in (None, "None", "", " "):
            yield list(line.get_ydata())


def _wedges(axes: Axes) -> Iterator[Any]:
    wedge = import_module("matplotlib.patches").Wedge
    for patch in axes.patches:
        if isinstance(patch, wedge):
            yield round((patch.theta2 - patch.theta1) / 360.0, 2)


_OFFICIAL: dict[str, Reading] = {
    "LineChart": _lines,
    "BarChart": _heights,
    "ScatterChart": _offsets,
    "PieChart": _fractions,
}
_FIXED: dict[str, Reading] = {
    "LineChart": _lines,
    "BarChart": _bars,
    "ScatterChart": _points,
    "PieChart": _wedges,
}
