"""A run over time: the columns of its ``metrics.jsonl``, and rates from their differences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

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


def timeline(lines: Sequence[Metrics], points: int) -> dict[str, list[Any]]:
    """Columns of about ``points`` lines, evenly over the time of work; the newest is among them. Rates
    are over the time since the line before, and null at the first of a start."""
    kept = [*_thinned(lines, points)]
    found: dict[str, list[Any]] = {name: [getattr(line, name) for line in kept] for name in _PLAIN}
    for name, total in _RATES.items():
        found[name] = [None] * bool(kept)
        for before, line in pairwise(kept):
            seconds = line.seconds - before.seconds
            is_known = line.start == before.start and seconds > 0
            done = max(0, total(line) - total(before))
            found[name].append(round(done / seconds, 3) if is_known else None)
    found["gpu_bytes"] = [
        sum(gpu.memory_bytes for gpu in line.gpus) if line.gpus else None for line in kept
    ]
    found["gpu_utilization"] = [
        [gpu.utilization for gpu in line.gpus] if line.gpus else None for line in kept
    ]
    return found


def newest_point(lines: Sequence[Metrics]) -> dict[str, Any] | None:
    """The last of each column; None if there are none."""
    found = timeline(lines[-2:], 2)
    return {name: column[-1] for name, column in found.items()} if lines else None


def _thinned(lines: Sequence[Metrics], points: int) -> Iterator[Metrics]:
    if len(lines) <= points:
        yield from lines
        return
    step = (lines[-1].seconds - lines[0].seconds) / points
    kept: Metrics | None = None
    for line in lines[:-1]:
        if kept is None or line.start != kept.start or line.seconds - kept.seconds >= step:
            kept = line
            yield line
    yield lines[-1]
