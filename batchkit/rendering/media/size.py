"""The target size of an image."""

from __future__ import annotations

from math import ceil, floor, isqrt, sqrt
from typing import NamedTuple

LARGEST_ASPECT = 200


class Size(NamedTuple):
    """In pixels."""

    width: int
    height: int


def target_size(width: int, height: int, *, min_pixels: int, max_pixels: int) -> Size:
    """The size with the aspect of ``width`` × ``height`` and a product within the limits.

    A size within the limits is kept. Otherwise both sides are scaled by
    √(limit / (width · height)), rounded down when shrinking and up when growing, in integers, so
    without float errors. ``max_pixels`` always holds: if it conflicts with the aspect (a side would
    fall below one pixel) or with ``min_pixels``, the longer side is cut. Both sides must be at
    least 1.
    """
    pixels = width * height
    if pixels > max_pixels:
        wide = max(1, isqrt(max_pixels * width // height))
        high = max(1, isqrt(max_pixels * height // width))
    elif pixels < min_pixels:
        wide = _root_up(min_pixels * width, height)
        high = _root_up(min_pixels * height, width)
    else:
        return Size(width, height)
    if wide >= high:
        return Size(min(wide, max_pixels // high), high)
    return Size(wide, min(high, max_pixels // wide))


def smart_size(width: int, height: int, *, factor: int, min_pixels: int, max_pixels: int) -> Size:
    """As ``smart_resize`` of transformers' Qwen-VL processors: both sides multiples of ``factor``.

    Rounded to the nearest multiple within the limits; scaled by √(limit / pixels) outside of them,
    down to a multiple when shrinking and up when growing. The processor keeps such a size, but
    refuses one whose longer side is more than ``LARGEST_ASPECT`` times the shorter.
    """
    wide, high = (round(side / factor) * factor for side in (width, height))
    if wide * high > max_pixels:
        beta = sqrt(height * width / max_pixels)
        wide, high = (max(factor, floor(s / beta / factor) * factor) for s in (width, height))
    elif wide * high < min_pixels:
        beta = sqrt(min_pixels / (height * width))
        wide, high = (ceil(s * beta / factor) * factor for s in (width, height))
    return Size(max(factor, wide), max(factor, high))


def _root_up(numerator: int, denominator: int) -> int:
    """√(numerator / denominator), rounded up."""
    return isqrt(-(-numerator // denominator) - 1) + 1
