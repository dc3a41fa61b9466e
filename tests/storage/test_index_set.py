"""A set of row indexes is stored as ranges, and stays small."""

from __future__ import annotations

from array import array

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchkit.storage.index_set import IndexSet, of_ranges, ranges_of

# Few distinct values make neighbours, and so ranges; the wide ones reach both ends of 32 bits.
SETS = st.sets(st.one_of(st.integers(0, 40), st.integers(0, 2**32 - 1)), max_size=60)


@given(SETS)
def test_a_set_is_stored_as_its_unbroken_runs(indexes: set[int]) -> None:
    runs: list[list[int]] = []
    for index in sorted(indexes):
        if runs and runs[-1][1] == index - 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    written = orjson.dumps(ranges_of(IndexSet(indexes)), option=orjson.OPT_SERIALIZE_NUMPY)
    assert orjson.loads(written) == runs
    assert of_ranges(orjson.loads(written)) == IndexSet(indexes)


@pytest.mark.slow
def test_ten_million_random_indexes_fit_a_checkpoint() -> None:
    """Half of 20 million rows, picked at random, is the worst case: no longer run can form."""
    picked = np.flatnonzero(np.random.default_rng(7).random(20_000_000) < 0.5)[:10_000_000]
    indexes = IndexSet(array("I", picked.astype(np.uint32).tobytes()))
    ranges = ranges_of(indexes)
    assert int((ranges[:, 1] - ranges[:, 0] + 1).sum()) == len(indexes) == len(picked) > 9_900_000
    assert (ranges[1:, 0] > ranges[:-1, 1] + 1).all()
    assert len(orjson.dumps(ranges, option=orjson.OPT_SERIALIZE_NUMPY)) < 20 * len(ranges)
