"""The window: grown when the engine's queue runs dry, cut when memory does, and never in haste."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchkit.engines.base import EngineLoad
from batchkit.execution.window import COOLDOWN_S, LARGEST, LEAST_FREE_MEMORY, Change, Window

MAX_NUM_SEQS = 16
PLENTY, SCARCE = 0.5, LEAST_FREE_MEMORY / 2


@dataclass
class Host:
    """A clock and a memory that the test sets, and the window that reads them."""

    max_num_seqs: int = MAX_NUM_SEQS
    fixed: int | None = None
    now: float = 1000.0
    free: float = PLENTY
    window: Window = field(init=False)

    def __post_init__(self) -> None:
        self.window = Window(
            self.max_num_seqs,
            fixed=self.fixed,
            clock=lambda: self.now,
            free_memory=lambda: self.free,
        )

    def adapt(
        self,
        *,
        waiting: int = 0,
        preempted: int = 0,
        in_flight: int | None = None,
        running: int | None = None,
        kv_cache_usage: float = 0.5,
    ) -> Change | None:
        """One look at an engine, by default one that runs all it can."""
        in_flight = self.window.size if in_flight is None else in_flight
        running = self.max_num_seqs if running is None else running
        return self.window.adapt(EngineLoad(running, waiting, kv_cache_usage, preempted), in_flight)

    def rest(self) -> None:
        self.now += COOLDOWN_S


def test_window_starts_at_one_and_a_half_times_what_runs_at_once() -> None:
    assert Host().window.size == 24
    assert Host(max_num_seqs=1).window.size == 2


def test_window_grows_when_it_was_full_and_the_queue_ran_dry() -> None:
    host = Host()
    assert host.adapt() == Change(24, 28, "the engine's queue ran dry")
    assert host.window.size == 28


def test_window_stays_while_requests_wait() -> None:
    host = Host()
    assert host.adapt(waiting=1) is None
    assert host.window.size == 24


def test_window_stays_when_it_was_not_full() -> None:
    """Rows that are not rendered yet are no reason to ask for more of them."""
    host = Host()
    assert host.adapt(in_flight=23) is None
    assert host.window.size == 24


def test_window_stays_while_the_engine_has_not_begun() -> None:
    """A new engine's queue is dry because nothing has been prepared for it yet."""
    assert Host().adapt(running=0) is None


def test_window_stays_while_the_kv_cache_is_full() -> None:
    host = Host()
    assert host.adapt(kv_cache_usage=0.95) is None
    assert host.adapt(kv_cache_usage=0.94) is not None


def test_window_starts_over_with_an_engine_of_another_size() -> None:
    host = Host()
    assert host.window.fit(16) is None
    assert host.window.fit(4) == Change(24, 6, "the engine runs 4 at once now")
    assert host.adapt() is None, "it rests"
    assert Host(fixed=7).window.fit(4) is None


def test_window_rests_after_a_change() -> None:
    host = Host()
    assert host.adapt() is not None
    host.now += COOLDOWN_S - 0.001
    assert host.adapt() is None
    host.free = SCARCE
    assert host.adapt(preempted=3, waiting=3) is None
    host.free = PLENTY
    host.now += 0.001
    assert host.adapt() is not None


def test_look_that_changes_nothing_needs_no_rest() -> None:
    host = Host()
    assert host.adapt(waiting=5) is None
    assert host.adapt() is not None


def test_window_grows_up_to_four_times_what_runs_at_once() -> None:
    host = Host()
    for _ in range(100):
        host.adapt()
        host.rest()
    assert host.window.size == LARGEST * MAX_NUM_SEQS
    assert host.adapt() is None


def test_scarce_memory_cuts_the_window_by_a_quarter_each_time_down_to_a_quarter_of_what_runs() -> (
    None
):
    host = Host(free=SCARCE)
    assert host.adapt() == Change(24, 18, "4% of memory is free")
    sizes = []
    for _ in range(20):
        host.rest()
        host.adapt()
        sizes.append(host.window.size)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == MAX_NUM_SEQS // 4
    host.rest()
    assert host.adapt() is None


def test_window_recovers_once_memory_is_free() -> None:
    host = Host(free=SCARCE)
    for _ in range(20):
        host.adapt()
        host.rest()
    host.free = PLENTY
    assert host.adapt() == Change(4, 8, "the engine's queue ran dry")


def test_preemption_cuts_the_window_but_not_below_what_runs_at_once() -> None:
    host = Host()
    assert host.adapt(preempted=3, waiting=5) == Change(24, 18, "3 requests preempted")
    host.rest()
    assert host.adapt(preempted=3, waiting=5) == Change(18, 16, "3 requests preempted")
    host.rest()
    assert host.adapt(preempted=3, waiting=5) is None
    assert host.window.size == MAX_NUM_SEQS


def test_preemption_with_nothing_waiting_cuts_nothing() -> None:
    host = Host()
    host.adapt(preempted=3, waiting=0, in_flight=20)
    assert host.window.size == 24


def test_preemption_does_not_undo_a_cut_for_memory() -> None:
    host = Host(free=SCARCE)
    for _ in range(5):
        host.adapt()
        host.rest()
    small = host.window.size
    assert small < MAX_NUM_SEQS
    host.free = PLENTY
    assert host.adapt(preempted=3, waiting=5) is None
    assert host.window.size == small


def test_scarce_memory_counts_before_a_dry_queue() -> None:
    host = Host(free=SCARCE)
    change = host.adapt(waiting=0)
    assert change is not None
    assert change.new < change.old


@pytest.mark.parametrize("free", [PLENTY, SCARCE])
def test_fixed_size_never_changes(free: float) -> None:
    host = Host(fixed=7, free=free)
    for waiting in (0, 5):
        for preempted in (0, 3):
            assert host.adapt(waiting=waiting, preempted=preempted) is None
            host.rest()
    assert host.window.size == 7


LOOKS = st.tuples(
    st.floats(0, 1), st.integers(0, 50), st.integers(0, 9), st.booleans(), st.floats(0, 30)
)


@given(st.integers(1, 600), st.lists(LOOKS, max_size=60))
def test_whatever_happens_the_size_stays_in_bounds_and_says_what_it_did(
    max_num_seqs: int, looks: list[tuple[float, int, int, bool, float]]
) -> None:
    host = Host(max_num_seqs=max_num_seqs)
    for free, waiting, preempted, is_full, pause_s in looks:
        host.free = free
        before = host.window.size
        change = host.adapt(
            waiting=waiting, preempted=preempted, in_flight=before if is_full else before - 1
        )
        assert 1 <= host.window.size <= max(2, LARGEST * max_num_seqs)
        if change is None:
            assert host.window.size == before
        else:
            assert change[:2] == (before, host.window.size)
            assert change.old != change.new
            assert change.reason
        host.now += pause_s
