"""The memory that a sample needed, from the run's ``metrics.jsonl``."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import NamedTuple

from batchkit.storage.metrics import read_metrics

_LEAST_USAGE = 0.02  # of the KV cache, to show how many requests fill it


class Memory(NamedTuple):
    """Peaks in GiB: resident memory of the run's processes, and memory in use on one GPU of this
    machine, by any process. ``kv_cache_rows``: how many such requests fill the KV cache. None if
    unknown."""

    host_gb: float | None
    gpu_gb: float | None
    kv_cache_rows: int | None


def memory_of(folder: Path, starts_before: int) -> Memory:
    """Of the starts after the first ``starts_before``."""
    lines = [line for line in read_metrics(folder) if line.start > starts_before]
    host = max((line.host_bytes or 0 for line in lines), default=0)
    gpu = max((gpu.memory_bytes for line in lines for gpu in line.gpus), default=0)
    full = [
        line.running / line.kv_cache_usage
        for line in lines
        if line.running and line.kv_cache_usage > _LEAST_USAGE
    ]
    return Memory(
        round(host / 2**30, 3) if host else None,
        round(gpu / 2**30, 3) if gpu else None,
        max(1, int(median(full))) if full else None,
    )
