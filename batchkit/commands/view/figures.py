"""The numbers for a run's charts and notes, taken from the newest record of each row."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from batchkit.runs.index import Index, Snapshot, Table

RUNS_KEPT = 4  # runs whose index and figures are kept; a comparison needs two
_BINS = 36  # maximum number of bins; up to four more are added to divide the axis
_COLUMNS = {
    "latency": ("Latency", "s"),
    "prompt_tokens": ("Prompt tokens", ""),
    "tokens": ("Completion tokens", ""),
}


class Figures(NamedTuple):
    """The figures of a run, apart from its scores.

    ``n_cut``: answers that ended at max_tokens. ``n_shortened``: prompts that were truncated to fit. ``failures``:
    one entry for each kind, the most frequent first, with its count and first message. ``spreads``: a histogram of
    each column that is not all 0.
    """

    n_rows: int
    n_cut: int
    n_shortened: int
    failures: list[dict[str, Any]]
    spreads: list[dict[str, Any]]


@lru_cache(RUNS_KEPT)  # computed from all rows, which takes time
def figures_of(index: Index, snapshot: Snapshot) -> Figures:
    """Return the numbers for the charts and notes of a run, from the newest record of each row in ``snapshot``."""
    rows = snapshot.newest
    reached = rows[snapshot.entries["prompt_tokens"][rows] > 0]  # rows that reached the engine
    n_cut, n_shortened = (int(snapshot.entries[n][rows].sum()) for n in ("is_cut", "is_shortened"))
    return Figures(
        len(rows), n_cut, n_shortened, _failures(index, snapshot), _spreads(snapshot, reached)
    )


def _failures(index: Index, snapshot: Snapshot) -> list[dict[str, Any]]:
    kinds = snapshot.entries["kind"][snapshot.newest]
    counts = np.bincount(kinds, minlength=len(snapshot.kinds))
    found = []
    for number in np.argsort(-counts, kind="stable").tolist():
        if number and counts[number]:
            first = snapshot.newest[np.argmax(kinds == number)]
            record = index.record(snapshot.entries[first])
            message = (record.get("error") or {}).get("message") or "no answer"
            kind = {"kind": snapshot.kinds[number], "count": int(counts[number])}
            found.append({**kind, "message": message, "index": record["index"]})
    return found


def _spreads(snapshot: Snapshot, rows: Table) -> list[dict[str, Any]]:
    """Return a histogram for each column of the entries at the positions ``rows``."""
    found = []
    for name, (title, unit) in _COLUMNS.items():
        values, counts = np.unique(snapshot.entries[name][rows], return_counts=True)
        if values.any():
            of_column = histogram(values.astype(np.float64), counts)
            found.append({"title": title, "unit": unit, **of_column})
    return found


def histogram(values: Table, counts: Table) -> dict[str, Any]:
    """Return ``counts`` over equal bins from ``low`` to ``top``. The bin width is 1, 2 or 5 times a power of ten.

    ``values`` are distinct and in ascending order; the argument ``counts`` says how often each occurs. If the largest
    value is more than twice the 99th percentile, the bins end near that percentile, and the last bin includes the
    ``overflow`` above. Integer values have integer bins.
    """
    median, p99 = (_percentile(values, counts, share) for share in (0.5, 0.99))
    least, largest = float(values[0]), float(values[-1])
    is_whole = bool((values == np.rint(values)).all())
    most = largest if largest <= 2 * p99 or p99 <= 0 else p99
    least = 0.0 if least <= most - least else least
    width = _nice(max((most - least) / _BINS, most / 1e9, float(is_whole)))
    low = np.floor(least / width) * width
    bins = int((most - low) / width) + 1
    bins += -bins % 4  # the axis has four parts
    top = low + bins * width
    places = np.clip((values - low) / width, 0, bins - 1).astype(np.int64)
    return {
        "counts": np.bincount(places, counts, bins).astype(np.int64).tolist(),
        "low": float(f"{low:.12g}"),
        "top": float(f"{top:.12g}"),
        "overflow": int(counts[values >= top].sum()),
        "is_whole": is_whole,
        "median": median,
        "p99": p99,
        "largest": largest,
    }


def _percentile(values: Table, counts: Table, share: float) -> float:
    """Return the percentile with linear interpolation, as ``numpy.percentile`` does."""
    ends = np.cumsum(counts)
    at = share * (int(ends[-1]) - 1)
    low, high = (float(values[np.searchsorted(ends, k, "right")]) for k in (int(at), np.ceil(at)))
    return low + (at - int(at)) * (high - low)


def _nice(least: float) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten that is at least ``least``."""
    power = float(10.0 ** np.floor(np.log10(least)))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least * (1 - 1e-9))
