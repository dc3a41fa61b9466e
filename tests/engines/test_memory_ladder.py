"""Smaller engines after memory ran out, and the way back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchkit.engines.faults import Fault
from batchkit.engines.memory_ladder import (
    LEAST_BATCHED_TOKENS,
    LEAST_CACHE_BYTES,
    LEAST_SHARE,
    LEAST_SHARE_FREE,
    STRETCH,
    Ladder,
)

FULL = Fault("oom", "OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB.")
OVER_CLAIM = Fault(
    "oom",
    "ValueError",
    "Free memory on device cuda:0 (3.2/79.2 GiB) on startup is less than desired GPU memory"
    " utilization (0.9, 71.3 GiB). Decrease GPU memory utilization",
)
WITHOUT_CACHE = Fault("oom", "ValueError", "No available memory for the cache blocks. Try")

CLAIMS = ("gpu_memory_utilization", "kv_cache_memory_bytes")


def all_the_way_down(limits: Mapping[str, Any], fault: Fault) -> list[dict[str, Any]]:
    """Every step that the ladder has for an engine which dies of ``fault`` each time."""
    ladder = Ladder()
    while ladder.step_down({**limits, **ladder.overrides}, fault) is not None:
        assert len(ladder.steps) < 1000
    return ladder.steps


def test_requests_at_once_are_halved_then_tokens_then_the_share_of_the_gpu() -> None:
    limits = {"max_num_seqs": 9, "max_num_batched_tokens": 3000, "gpu_memory_utilization": 0.75}
    assert all_the_way_down(limits, FULL) == [
        {"max_num_seqs": 4},
        {"max_num_seqs": 2},
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 1500},
        {"max_num_batched_tokens": 750},
        {"max_num_batched_tokens": LEAST_BATCHED_TOKENS},
        {"gpu_memory_utilization": 0.65},
        {"gpu_memory_utilization": 0.55},
    ]


def test_a_fixed_kv_cache_is_halved_in_place_of_the_share() -> None:
    limits = {"max_num_seqs": 2, "kv_cache_memory_bytes": 4 * LEAST_CACHE_BYTES + 1}
    assert all_the_way_down(limits, FULL) == [
        {"max_num_seqs": 1},
        {"kv_cache_memory_bytes": 2 * LEAST_CACHE_BYTES},
        {"kv_cache_memory_bytes": LEAST_CACHE_BYTES},
    ]


def test_more_asked_for_than_is_free_lowers_the_claim_alone() -> None:
    rest = {"max_num_seqs": 8, "max_num_batched_tokens": 3000}
    assert all_the_way_down({**rest, "gpu_memory_utilization": 0.45}, OVER_CLAIM) == [
        {"gpu_memory_utilization": 0.35},
        {"gpu_memory_utilization": 0.25},
        {"gpu_memory_utilization": 0.15},
    ]
    cache = {"kv_cache_memory_bytes": 2 * LEAST_CACHE_BYTES}
    assert all_the_way_down({**rest, **cache}, OVER_CLAIM) == [
        {"kv_cache_memory_bytes": LEAST_CACHE_BYTES}
    ]


def test_a_claim_goes_lower_where_others_hold_the_memory_than_where_the_batch_does() -> None:
    limits = {"max_num_seqs": 1, "gpu_memory_utilization": 0.9}
    lowest = [
        all_the_way_down(limits, fault)[-1]["gpu_memory_utilization"]
        for fault in (FULL, OVER_CLAIM)
    ]
    assert lowest == [LEAST_SHARE, LEAST_SHARE_FREE]


def test_no_room_for_a_kv_cache_leaves_the_claim_as_it_is() -> None:
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 1000, "gpu_memory_utilization": 0.9}
    assert all_the_way_down(limits, WITHOUT_CACHE) == [
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": LEAST_BATCHED_TOKENS},
    ]


def test_after_the_claim_the_way_down_goes_on_as_the_next_fault_asks() -> None:
    ladder, limits = Ladder(), {"max_num_seqs": 8, "gpu_memory_utilization": 0.9}
    for fault in (OVER_CLAIM, FULL, WITHOUT_CACHE, OVER_CLAIM):
        ladder.step_down({**limits, **ladder.overrides}, fault)
    assert ladder.steps == [
        {"gpu_memory_utilization": 0.8},
        {"max_num_seqs": 4},
        {"max_num_seqs": 2},
        {"gpu_memory_utilization": 0.7},
    ]


@pytest.mark.parametrize("fault", [FULL, OVER_CLAIM, WITHOUT_CACHE])
@pytest.mark.parametrize("limits", [{}, {"max_num_seqs": 1, "kv_cache_memory_bytes": 1}])
def test_the_bottom_adds_no_step(limits: dict[str, Any], fault: Fault) -> None:
    ladder = Ladder([{"max_num_seqs": 1}])
    assert ladder.step_down(limits, fault) is None
    assert ladder.steps == [{"max_num_seqs": 1}]


LIMITS = st.builds(
    lambda batch, claim: {**batch, **claim},
    st.fixed_dictionaries(
        {"max_num_seqs": st.integers(1, 1024)},
        optional={"max_num_batched_tokens": st.integers(1, 65536)},
    ),
    st.one_of(
        st.fixed_dictionaries({"gpu_memory_utilization": st.floats(0.05, 1.0)}),
        st.fixed_dictionaries({"kv_cache_memory_bytes": st.integers(1, 2**40)}),
    ),
)
FAULTS = st.sampled_from([FULL, OVER_CLAIM, WITHOUT_CACHE])


@given(LIMITS, FAULTS)
def test_every_way_down_ends_and_each_step_makes_one_option_smaller(
    limits: dict[str, Any], fault: Fault
) -> None:
    now = dict(limits)
    for step in all_the_way_down(limits, fault):
        ((name, value),) = step.items()
        assert 0 < value < now[name]
        assert not (fault.is_over_claim and name not in CLAIMS)
        assert not (fault.is_without_cache and name in CLAIMS)
        now[name] = value
    if not fault.is_over_claim:
        assert now["max_num_seqs"] == 1
        assert now.get("max_num_batched_tokens", 0) <= LEAST_BATCHED_TOKENS


@given(LIMITS, FAULTS, st.integers(0, 20), st.integers(0, 20))
def test_each_step_up_takes_back_exactly_one_step(
    limits: dict[str, Any], fault: Fault, down: int, up: int
) -> None:
    ladder = Ladder(stretch=1)
    for _ in range(down):
        ladder.step_down({**limits, **ladder.overrides}, fault)
    steps = list(ladder.steps)
    seen = [Ladder(steps[:n]).overrides for n in range(len(steps) + 1)]
    for _ in range(up):
        if ladder.succeeded(1):
            ladder.step_up()
            seen.pop()
        assert ladder.overrides == seen[-1]


def stepped_down(stretch: int) -> Ladder:
    """Two steps below the job's own settings."""
    return Ladder([{"max_num_seqs": 4}, {"max_num_seqs": 2}], stretch=stretch)


def run_out(ladder: Ladder) -> None:
    assert ladder.step_down({"max_num_seqs": 64}, FULL) is not None


def test_success_never_goes_past_where_it_began() -> None:
    ladder = Ladder([{"max_num_seqs": 4}], stretch=10)
    assert ladder.succeeded(10)
    ladder.step_up()
    assert ladder.overrides == {}
    assert not ladder.succeeded(10**6)


def test_the_stretch_is_counted_from_the_last_step() -> None:
    ladder = Ladder(stretch=100)
    run_out(ladder)
    assert not ladder.succeeded(60)
    run_out(ladder)
    assert not ladder.succeeded(60), "those before the step do not count"
    assert ladder.succeeded(40)
    assert ladder.succeeded(1), "it stays time until the step is taken"
    ladder.step_up()
    assert not ladder.succeeded(99)


def test_a_step_up_that_holds_leaves_the_stretch_as_long_as_it_was() -> None:
    ladder = stepped_down(100)
    assert ladder.succeeded(100)
    ladder.step_up()
    assert not ladder.succeeded(99)
    assert ladder.succeeded(1)
    ladder.step_up()
    run_out(ladder)
    run_out(ladder)
    assert not ladder.succeeded(199), "the second step up is what failed, once"
    assert ladder.succeeded(1)


def test_a_step_up_that_fails_doubles_the_stretch_each_time() -> None:
    ladder = Ladder([{"max_num_seqs": 4}], stretch=100)
    for stretch in (100, 200, 400):
        assert not ladder.succeeded(stretch - 1)
        assert ladder.succeeded(1)
        ladder.step_up()
        run_out(ladder)
    assert not ladder.succeeded(799)
    assert ladder.succeeded(1)


def test_a_step_up_that_held_for_a_stretch_is_not_to_blame_for_a_later_death() -> None:
    ladder = Ladder([{"max_num_seqs": 4}], stretch=100)
    ladder.succeeded(100)
    ladder.step_up()
    ladder.succeeded(100)
    run_out(ladder)
    assert not ladder.succeeded(99)
    assert ladder.succeeded(1)


def test_a_step_up_is_on_trial_to_the_end_of_its_stretch() -> None:
    ladder = Ladder([{"max_num_seqs": 4}], stretch=100)
    ladder.succeeded(100)
    ladder.step_up()
    ladder.succeeded(99)
    run_out(ladder)
    assert not ladder.succeeded(199)


def test_overrides_are_all_steps_merged_the_last_one_wins() -> None:
    ladder = Ladder([{"max_num_seqs": 2}, {"max_num_seqs": 1}, {"max_num_batched_tokens": 1024}])
    assert ladder.overrides == {"max_num_seqs": 1, "max_num_batched_tokens": 1024}
    ladder.step_up()
    assert ladder.overrides == {"max_num_seqs": 1}


@pytest.mark.parametrize("remembered", [None, []])
def test_a_new_ladder_changes_nothing(remembered: list[dict[str, Any]] | None) -> None:
    ladder = Ladder(remembered)
    assert ladder.overrides == {}
    assert not ladder.succeeded(STRETCH)


def test_a_request_alone_gets_fewer_tokens_at_a_time_but_one_for_each_that_may_run() -> None:
    limits = {"max_num_seqs": 1024, "max_num_batched_tokens": 2048, "gpu_memory_utilization": 0.9}
    ladder, fault = Ladder(), Fault("oom", "OutOfMemoryError", "planted")
    assert ladder.step_down(limits, fault, alone=True) == {"max_num_batched_tokens": 1024}
    limits |= ladder.overrides
    assert ladder.step_down(limits, fault, alone=True) == {"gpu_memory_utilization": 0.8}
