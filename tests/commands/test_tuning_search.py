"""The search for the largest batch that fits and still gains."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from batchkit.commands.tuning.find import Rate, search


class CountingTrials:
    """No engine: sizes up to ``threshold`` fit, and ``rate`` gives their throughput."""

    def __init__(
        self, threshold: int, rate: Callable[[int], float] = float, *, is_sure: bool = True
    ) -> None:
        self.threshold, self.rate, self.is_sure = threshold, rate, is_sure
        self.tried: list[int] = []

    def __call__(self, size: int) -> Rate | None:
        self.tried.append(size)
        return Rate(self.rate(size), self.is_sure) if size <= self.threshold else None

    @property
    def largest(self) -> int:
        return max((size for size in self.tried if size <= self.threshold), default=0)


@given(low=st.integers(1, 64), span=st.integers(0, 4000), threshold=st.integers(0, 5000))
def test_search_finds_the_largest_that_fits(low: int, span: int, threshold: int) -> None:
    trials = CountingTrials(threshold)
    assert not search(low, low + span, trials)
    expected = min(threshold, low + span)
    assert trials.largest == (expected if expected >= low else 0)
    assert len(set(trials.tried)) == len(trials.tried), "no size is tried twice"
    assert all(low <= size <= low + span for size in trials.tried)
    assert len(trials.tried) <= 2 * (low + span).bit_length() + 1


@given(low=st.integers(1, 16), flat_from=st.integers(1, 500))
def test_search_stops_where_throughput_has_flattened(low: int, flat_from: int) -> None:
    trials = CountingTrials(10**6, lambda size: float(min(size, flat_from)))
    assert search(low, 10**5, trials)
    *_, before, last = trials.tried
    assert last == 2 * before
    assert flat_from < 2.07 * before, "the last doubling was one too many at most"


def test_slower_larger_sizes_end_the_search_too() -> None:
    trials = CountingTrials(10**6, lambda size: float(min(size, 64 - size)))
    assert search(1, 1024, trials)
    assert trials.tried == [1, 2, 4, 8, 16, 32, 64]


def test_few_rows_are_no_reason_to_stop() -> None:
    trials = CountingTrials(40, lambda size: 1.0, is_sure=False)
    assert not search(1, 1024, trials)
    assert trials.largest == 40


def test_flat_at_the_largest_allowed_is_no_early_stop() -> None:
    trials = CountingTrials(10**6, lambda size: 1.0)
    assert not search(8, 16, trials)
    assert trials.tried == [8, 16]
