"""The same rows in two runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from batchkit.scoring.metrics import OUT_OF_TEN
from batchkit.sources.input import input_changes
from batchkit.storage.manifest import Manifest

if TYPE_CHECKING:
    from numpy.typing import NDArray

GRADED_STEP = 0.5  # of 1: how far a graded score must move for its row to count as flipped
REWARD_STEP = 2.0  # of 10
_NUMBERING = ("input.format", "input.records")  # keys that say which rows a file has
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class RowKeys(NamedTuple):
    """What names the rows of a run: a hash of each one's id (uint64), and its index, ascending."""

    ids: np.ndarray[Any, Any]
    rows: np.ndarray[Any, Any]


class Pairing(NamedTuple):
    """Places of the same rows in both runs, in the order of the first."""

    before: NDArray[np.int64]
    after: NDArray[np.int64]


def paired(a: RowKeys, b: RowKeys, *, by_place: bool) -> Pairing:
    """Rows that share an id are paired ``by_place`` in the input, or in their order."""
    _, before, after = np.intersect1d(
        _unique(a, by_place), _unique(b, by_place), return_indices=True
    )
    order = np.argsort(before)
    return Pairing(before[order], after[order])


def have_same_input(a: Manifest, b: Manifest) -> bool:
    """Whether a row has the same index in both runs; False if that is unknown."""
    return (
        bool(a.input)
        and not input_changes(a.input, b.input)
        and all(a.identity.get(key) == b.identity.get(key) for key in _NUMBERING)
    )


def flipped(
    scorer: str, before: NDArray[np.floating], after: NDArray[np.floating]
) -> NDArray[np.int8]:
    """1 better, -1 worse, 0 neither; for each row. nan: not scored."""
    change = np.nan_to_num(after - before)
    is_binary = all(np.isin(found[~np.isnan(found)], (0, 1)).all() for found in (before, after))
    graded = REWARD_STEP if scorer in OUT_OF_TEN else GRADED_STEP
    step = 1.0 if is_binary and scorer not in OUT_OF_TEN else graded
    found: NDArray[np.int8] = (np.sign(change) * (np.abs(change) >= step - 1e-9)).astype(np.int8)
    return found


def _unique(keys: RowKeys, by_place: bool) -> np.ndarray[Any, Any]:
    """For each row, a number that is equal in both runs for the row with an id at the same index, or for
    the n-th row with that id."""
    ids, rows = keys
    if by_place:
        found: np.ndarray[Any, Any] = ids + rows.astype(np.uint64) * _GOLDEN
        return found
    order = np.argsort(ids, kind="stable")
    ordered, places = ids[order], np.arange(len(ids))
    is_first = np.append(True, ordered[1:] != ordered[:-1])[: len(ids)]
    nth = places - np.maximum.accumulate(np.where(is_first, places, 0))
    unique = np.empty_like(ids)
    unique[order] = ordered + nth.astype(np.uint64) * _GOLDEN
    return unique
