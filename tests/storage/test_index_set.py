"""A set of row indexes speaks in ranges, and stays small."""

from __future__ import annotations

from array import array

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchkit.storage.index_set import IndexSet

INDEXES = st.integers(0, 2**32 - 1)
# Few distinct values make neighbours, and so ranges; the wide ones reach both ends of 32 bits.
SETS = st.sets(st.one_of(st.integers(0, 40), INDEXES), max_size=60)


def ranges_by_hand(indexes: set[int]) -> list[list[int]]:
    found: list[list[int]] = []
    for index in sorted(indexes):
        if found and found[-1][1] == index - 1:
            found[-1][1] = index
        else:
            found.append([index, index])
    return found


@given(SETS)
def test_ranges_are_the_unbroken_runs_in_order(indexes: set[int]) -> None:
    assert IndexSet(indexes).ranges().tolist() == ranges_by_hand(indexes)


@given(SETS)
def test_ranges_come_back_through_json_as_the_same_set(indexes: set[int]) -> None:
    written = orjson.dumps(IndexSet(indexes).ranges(), option=orjson.OPT_SERIALIZE_NUMPY)
    again = IndexSet.from_ranges(orjson.loads(written))
    assert set(again) == indexes
    assert again == IndexSet(indexes)


@given(SETS)
def test_length_order_and_membership_are_those_of_the_indexes(indexes: set[int]) -> None:
    found = IndexSet(indexes)
    assert len(found) == len(indexes)
    assert list(found) == sorted(indexes)
    assert all(index in found for index in indexes)
    assert all((index - 1 in found) == (index - 1 in indexes) for index in indexes if index)


@given(SETS, SETS)
def test_union_holds_both_and_changes_neither(left: set[int], right: set[int]) -> None:
    a, b = IndexSet(left), IndexSet(right)
    both = a | b
    both.add(50)
    both.discard(min(left, default=50))
    assert set(a | b) == left | right
    assert (set(a), set(b)) == (left, right)


@given(st.lists(st.tuples(st.sampled_from(["add", "discard"]), st.integers(0, 20))))
def test_adding_and_discarding_do_what_a_set_does(steps: list[tuple[str, int]]) -> None:
    found, model = IndexSet(), set[int]()
    for verb, index in steps:
        getattr(found, verb)(index)
        getattr(model, verb)(index)
    assert set(found) == model
    assert found.ranges().tolist() == ranges_by_hand(model)


def test_empty_set_has_no_ranges() -> None:
    assert IndexSet().ranges().shape == (0, 2)
    assert IndexSet.from_ranges([]) == IndexSet()


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=8))
def test_overlapping_ranges_join(starts: list[tuple[int, int]]) -> None:
    ranges = [(first, first + length) for first, length in starts]
    model = {index for first, last in ranges for index in range(first, last + 1)}
    assert set(IndexSet.from_ranges(ranges)) == model


@pytest.mark.parametrize("ranges", [[(5, 4)], [(-1, 3)], [(1, 2, 3)], [(1,)]])
def test_what_is_no_range_is_refused(ranges: list[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match=r"range|values to unpack"):
        IndexSet.from_ranges(ranges)  # type: ignore[arg-type]


def test_ten_million_random_indexes_fit_a_checkpoint() -> None:
    """Half of 20 million rows, picked at random, is the worst case: no longer run can form."""
    picked = np.flatnonzero(np.random.default_rng(7).random(20_000_000) < 0.5)[:10_000_000]
    indexes = IndexSet(array("I", picked.astype(np.uint32).tobytes()))
    ranges = indexes.ranges()
    written = orjson.dumps(ranges, option=orjson.OPT_SERIALIZE_NUMPY)
    print(f"{len(indexes):,} indexes: {len(ranges):,} ranges, {len(written):,} bytes of JSON")
    assert len(indexes) == len(picked) > 9_900_000
    assert int((ranges[:, 1] - ranges[:, 0] + 1).sum()) == len(indexes)
    assert (ranges[1:, 0] > ranges[:-1, 1] + 1).all()
    assert len(written) < 20 * len(ranges)  # two numbers of 8 digits, brackets, commas

    every_row_done = IndexSet.from_ranges([(0, 9_999_999)])
    assert every_row_done.ranges().tolist() == [[0, 9_999_999]]
