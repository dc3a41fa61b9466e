"""The window: grown when the engine's queue runs dry, cut when memory does, and never in haste."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchkit.engines.base import EngineLoad
from batchkit.execution.window import COOLDOWN_S, LARGEST, LEAST_FREE_MEMORY, Window

MAX_NUM_SEQS = 16
PLENTY, SCARCE = 0.5, LEAST_FREE_MEMORY / 2
DRY, FREE = "the engine's queue was empty", "4% of memory is free"
PREEMPTED = {"preempted": 3, "waiting": 5}


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
        rest: bool = True,
        **state: Any,
    ) -> str:
        """One look at an engine, by default one that runs all it can; ``state`` is set before."""
        for name, value in state.items():
            setattr(self, name, value)
        in_flight = self.window.size if in_flight is None else in_flight
        running = self.max_num_seqs if running is None else running
        load = EngineLoad(running, waiting, kv_cache_usage, preempted)
        change = self.window.adapt(load, in_flight, self.max_num_seqs)
        self.now += COOLDOWN_S if rest else 0
        return change


Looks = Sequence[tuple[Mapping[str, Any], str]]


@pytest.mark.parametrize(
    ("host", "looks"),
    [
        pytest.param({}, [({}, f"24 → 28: {DRY}")], id="full, and the queue ran dry"),
        pytest.param({"max_num_seqs": 1}, [({}, f"2 → 3: {DRY}")], id="of one row"),
        pytest.param({}, [({"waiting": 1}, "")], id="requests wait"),
        pytest.param({}, [({"in_flight": 23}, "")], id="not full: rows are not rendered yet"),
        pytest.param({}, [({"running": 0}, "")], id="a new engine has nothing prepared yet"),
        pytest.param(
            {},
            [({"kv_cache_usage": 0.95}, ""), ({"kv_cache_usage": 0.94}, f"24 → 28: {DRY}")],
            id="KV cache is full",
        ),
        pytest.param(
            {},
            [
                ({"max_num_seqs": 4, "rest": False}, "24 → 6: the engine's max_num_seqs is 4 now"),
                ({}, ""),
            ],
            id="an engine of another size, then a rest",
        ),
        pytest.param(
            {},
            [
                ({"rest": False}, f"24 → 28: {DRY}"),
                ({"now": 1000 + COOLDOWN_S - 0.001, "rest": False}, ""),
                ({"free": SCARCE, "rest": False, **PREEMPTED}, ""),
                ({"now": 1000 + COOLDOWN_S, "free": PLENTY}, f"28 → 32: {DRY}"),
            ],
            id="rests after a change",
        ),
        pytest.param(
            {},
            [({"waiting": 5, "rest": False}, ""), ({}, f"24 → 28: {DRY}")],
            id="a look that changes nothing needs no rest",
        ),
        pytest.param(
            {"free": SCARCE},
            [
                ({}, f"24 → 18: {FREE}"),
                ({}, f"18 → 13: {FREE}"),
                ({}, f"13 → 9: {FREE}"),
                (PREEMPTED | {"free": PLENTY}, ""),
                ({"free": SCARCE}, f"9 → 6: {FREE}"),
                ({}, f"6 → 4: {FREE}"),
                ({}, ""),
                ({"free": PLENTY}, f"4 → 8: {DRY}"),
            ],
            id="scarce memory, which preemption does not undo, and its end",
        ),
        pytest.param(
            {},
            [
                (PREEMPTED, "24 → 18: 3 requests preempted"),
                (PREEMPTED, "18 → 16: 3 requests preempted"),
                (PREEMPTED, ""),
            ],
            id="preempted, not below what runs at once",
        ),
        pytest.param({}, [({"preempted": 3, "in_flight": 20}, "")], id="nothing waits"),
        pytest.param(
            {"fixed": 7},
            [({}, ""), (PREEMPTED, ""), ({"free": SCARCE}, ""), ({"max_num_seqs": 4}, "")],
            id="fixed",
        ),
    ],
)
def test_each_look_changes_the_window_as_written(host: dict[str, Any], looks: Looks) -> None:
    made = Host(**host)
    for look, change in looks:
        assert made.adapt(**look).removeprefix("limit of requests in flight ") == change


def test_window_grows_up_to_four_times_what_runs_at_once() -> None:
    host = Host()
    assert [bool(host.adapt()) for _ in range(100)].index(False) == 10
    assert host.window.size == LARGEST * MAX_NUM_SEQS


LOOKS = st.tuples(
    st.floats(0, 1), st.integers(0, 50), st.integers(0, 9), st.booleans(), st.floats(0, 30)
)


@given(st.integers(1, 600), st.lists(LOOKS, max_size=60))
def test_whatever_happens_the_size_stays_in_bounds_and_says_what_it_did(
    max_num_seqs: int, looks: list[tuple[float, int, int, bool, float]]
) -> None:
    host = Host(max_num_seqs=max_num_seqs)
    for free, waiting, preempted, is_full, pause_s in looks:
        before = host.window.size
        in_flight = before if is_full else before - 1
        change = host.adapt(
            waiting=waiting, preempted=preempted, in_flight=in_flight, rest=False, free=free
        )
        size = host.window.size
        assert 1 <= size <= max(2, LARGEST * max_num_seqs)
        is_as_said = (
            re.match(rf"limit of requests in flight {before} → {size}: ", change) and size != before
        )
        assert is_as_said if change else size == before
        host.now += pause_s
