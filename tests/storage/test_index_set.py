"""A set of row indexes is stored as ranges, and stays small."""

from __future__ import annotations

import orjson
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
