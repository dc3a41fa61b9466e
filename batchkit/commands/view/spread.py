"""How a number is spread over the rows of a run: a histogram, and what is said below it."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np

from batchkit.runs.columns import Table
from batchkit.runs.index import Snapshot

_MOST_BINS = 40
_COLUMNS = {
    "latency": ("Latency", "s"),
    "prompt_tokens": ("Prompt tokens", ""),
    "tokens": ("Completion tokens", ""),
}


def spreads(snapshot: Snapshot) -> list[dict[str, Any]]:
    """Those of the rows that reached the engine; none of a column that is 0 in all of them."""
    rows = snapshot.entries[snapshot.newest]
    rows = rows[rows["prompt_tokens"] > 0]
    return [
        {"title": title, "unit": unit, **histogram(rows[column].astype(np.float64))}
        for column, (title, unit) in _COLUMNS.items()
        if rows[column].any()
    ]


def histogram(values: Table) -> dict[str, Any]:
    """``counts`` over a multiple of four equal bins from ``low`` to ``top``, whose edges have few digits.
    If a long tail would squeeze the rest, it ends at the 99th percentile, and the last bin also counts
    the ``overflow`` above. Bins of whole numbers are whole.
    """
    median, p99 = map(float, np.percentile(values, (50, 99)))
    least, largest = float(values.min()), float(values.max())
    is_whole = bool((values == np.rint(values)).all())
    most = largest if largest <= 2 * p99 or p99 <= 0 else p99
    least = 0.0 if least <= most - least else least
    width = 0.0
    for width in _widths(max((most - least) / _MOST_BINS, most / 1e9, float(is_whole))):
        first = np.floor(least / width)
        bins = int(np.floor(most / width) - first) + 1
        bins += -bins % 4
        if bins <= _MOST_BINS:
            break
    low = float(first * width)
    places = np.clip((values - low) / width, 0, bins - 1).astype(np.int64)
    return {
        "counts": np.bincount(places, minlength=bins).tolist(),
        "low": _short(low),
        "top": _short(low + bins * width),
        "overflow": int((values >= low + bins * width).sum()),
        "is_whole": is_whole,
        "median": median,
        "p99": p99,
        "largest": largest,
    }


def _widths(least: float) -> Any:
    """1, 2 or 5 times a power of ten, from ``least`` on."""
    power = int(np.floor(np.log10(least)))
    widths = (step * 10.0**exponent for exponent in count(power) for step in (1, 2, 5))
    return (_short(width) for width in widths if width >= least * (1 - 1e-9))


def _short(value: float) -> float:
    return float(f"{value:.12g}")
