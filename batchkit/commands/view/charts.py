"""The numbers that the page draws: a run over time, and how a number is spread over its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from batchkit.runs.index import Snapshot, Table
from batchkit.storage.metrics import Metrics

_PLAIN = (
    *("at", "seconds", "start", "rows_ok", "rows_failed", "window", "in_flight", "running"),
    *("waiting", "kv_cache_usage", "preemptions", "engine_restarts", "host_bytes"),
)
_RATES: dict[str, Callable[[Metrics], int]] = {
    "rows_per_s": lambda line: line.rows_ok + line.rows_failed,
    "prompt_tokens_per_s": lambda line: line.prompt_tokens,
    "completion_tokens_per_s": lambda line: line.completion_tokens + line.unfinished_tokens,
}
_BINS = 36  # at most, and up to four more
_COLUMNS = {
    "latency": ("Latency", "s"),
    "prompt_tokens": ("Prompt tokens", ""),
    "tokens": ("Completion tokens", ""),
}


def timeline(lines: Sequence[Metrics]) -> dict[str, list[Any]]:
    """A column for each number. Rates are over the time since the line before, and null at the first of a
    start."""
    found: dict[str, list[Any]] = {name: [getattr(line, name) for line in lines] for name in _PLAIN}
    for name, total in _RATES.items():
        found[name] = [None] * bool(lines)
        for before, line in pairwise(lines):
            seconds = line.seconds - before.seconds
            is_known = line.start == before.start and seconds > 0
            done = max(0, total(line) - total(before))
            found[name].append(round(done / seconds, 3) if is_known else None)
    found["gpu_bytes"] = [
        sum(gpu.memory_bytes for gpu in line.gpus) if line.gpus else None for line in lines
    ]
    found["gpu_utilization"] = [
        [gpu.utilization for gpu in line.gpus] if line.gpus else None for line in lines
    ]
    return found


def newest_point(lines: Sequence[Metrics]) -> dict[str, Any] | None:
    """The last of each column; None if there are none."""
    found = timeline(lines[-2:])
    return {name: column[-1] for name, column in found.items()} if lines else None


def spreads(snapshot: Snapshot) -> list[dict[str, Any]]:
    """Those of the rows that reached the engine; none of a column that is 0 in all of them."""
    rows = snapshot.newest[snapshot.entries["prompt_tokens"][snapshot.newest] > 0]
    values = {name: snapshot.entries[name][rows] for name in _COLUMNS}
    return [
        {"title": title, "unit": unit, **histogram(values[name].astype(np.float64))}
        for name, (title, unit) in _COLUMNS.items()
        if values[name].any()
    ]


def histogram(values: Table) -> dict[str, Any]:
    """``counts`` over equal bins from ``low`` to ``top``, whose width is 1, 2 or 5 times a power of ten. If a long
    tail would squeeze the rest, the last bin ends at the 99th percentile, and also counts the ``overflow`` above.
    Bins of whole numbers are whole.
    """
    median, p99 = map(float, np.percentile(values, (50, 99)))
    least, largest = float(values.min()), float(values.max())
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
        "counts": np.bincount(places, minlength=bins).tolist(),
        "low": float(f"{low:.12g}"),
        "top": float(f"{top:.12g}"),
        "overflow": int((values >= top).sum()),
        "is_whole": is_whole,
        "median": median,
        "p99": p99,
        "largest": largest,
    }


def _nice(least: float) -> float:
    """The next of 1, 2 and 5 times a power of ten."""
    power = float(10.0 ** np.floor(np.log10(least)))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least * (1 - 1e-9))
