"""Compact sets of row indexes: Roaring bitmaps in memory, ranges on disk."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pyroaring import BitMap as IndexSet

if TYPE_CHECKING:
    import numpy as np

__all__ = ["IndexSet", "of_ranges", "ranges_of"]


def of_ranges(ranges: Iterable[tuple[int, int]]) -> IndexSet:
    """Return the set of all indexes in ``ranges`` of (first, last), both included."""
    found = IndexSet()
    for first, last in ranges:
        found.add_range(first, last + 1)
    return found


def ranges_of(indexes: IndexSet) -> np.ndarray[Any, Any]:
    """Return the first and last index of each group of consecutive indexes, ascending: int64 of shape (groups, 2).

    The function is vectorized, because a run may have ten million scattered indexes (0.1 s).
    """
    import numpy as np

    found = np.array(indexes.to_array(), dtype=np.int64)
    breaks = np.flatnonzero(np.diff(found) != 1)
    runs = found[:1], found[breaks + 1], found[breaks], found[-1:]
    first, last = np.concatenate(runs[:2]), np.concatenate(runs[2:])
    return np.ascontiguousarray(np.stack((first, last), axis=1))
