"""The search: which batch sizes to try, given the results so far."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

LEAST_GAIN = 0.03


class Rate(NamedTuple):
    """Throughput of a size that fits. ``is_sure``: on so many rows that 3 % more is not chance."""

    per_s: float
    is_sure: bool = True


def search(low: int, high: int, rate_of: Callable[[int], Rate | None]) -> bool:
    """Try sizes from ``low`` by doubling, then by halving the gap between what fits and what does not.

    ``rate_of`` tries a size: its throughput, or None if it does not fit. No size is tried twice.
    Returns True if it stopped because a doubling surely gained less than 3 %: then larger sizes may
    fit, too. Else the largest size up to ``high`` that fits was tried, if any does and a size fits
    whenever a larger one does.
    """
    fits, size = 0, low
    best = Rate(0.0)
    while (rate := rate_of(size)) is not None:
        is_flat = rate.per_s < best.per_s * (1 + LEAST_GAIN)
        has_flattened = is_flat and rate.is_sure and best.is_sure
        fits, best = size, max(best, rate)
        if size >= high or has_flattened:
            return size < high
        size = min(2 * size, high)
    too_large = size
    while fits and too_large - fits > 1:
        size = (fits + too_large) // 2
        if rate_of(size) is None:
            too_large = size
        else:
            fits = size
    return False
