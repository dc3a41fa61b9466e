"""Smaller engines after memory ran out, and the way back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchkit.ladder import LEAST_BATCHED_TOKENS, LEAST_UTILIZATION, Ladder


def all_the_way_down(job_options: Mapping[str, Any], ladder: Ladder | None = None) -> list[Any]:
    """Every step, as the supervisor asks for them; the last one is None."""
    ladder = ladder or Ladder()
    steps = []
    while True:
        options = {**job_options, **ladder.overrides}
        steps.append(ladder.step_down(options, options["max_num_seqs"]))
        if steps[-1] is None:
            return steps


def test_requests_at_once_are_halved_then_tokens_then_the_share_of_the_gpu() -> None:
    job = {"max_num_seqs": 8, "max_num_batched_tokens": 3000, "gpu_memory_utilization": 0.75}
    assert all_the_way_down(job) == [
        {"max_num_seqs": 4},
        {"max_num_seqs": 2},
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 1500},
        {"max_num_batched_tokens": 750},
        {"max_num_batched_tokens": LEAST_BATCHED_TOKENS},
        {"gpu_memory_utilization": 0.65},
        {"gpu_memory_utilization": 0.55},
        {"gpu_memory_utilization": 0.45},
        None,
    ]


def test_vllm_decides_about_tokens_where_the_job_does_not() -> None:
    assert [list(step) for step in all_the_way_down({"max_num_seqs": 1})[:-1]] == [
        ["gpu_memory_utilization"]
    ] * 4


def test_a_fixed_kv_cache_leaves_the_share_of_the_gpu_alone() -> None:
    job = {"max_num_seqs": 2, "kv_cache_memory_bytes": 2**28}
    assert all_the_way_down(job) == [{"max_num_seqs": 1}, None]


def test_the_bottom_adds_no_step() -> None:
    ladder = Ladder()
    job = {"max_num_seqs": 1, "kv_cache_memory_bytes": 2**28}
    assert ladder.step_down(job, 1) is None
    assert ladder.steps == []


JOBS = st.fixed_dictionaries(
    {"max_num_seqs": st.integers(1, 1024)},
    optional={
        "max_num_batched_tokens": st.integers(1, 65536),
        "gpu_memory_utilization": st.floats(0.05, 1.0),
        "kv_cache_memory_bytes": st.just(2**28),
    },
)


@given(JOBS)
def test_every_way_down_ends_and_each_step_makes_one_option_smaller(job: dict[str, Any]) -> None:
    defaults = {"gpu_memory_utilization": 0.9}
    before = {**defaults, **job}
    for step in all_the_way_down(job)[:-1]:
        ((name, value),) = step.items()
        assert 0 < value < before[name]
        before[name] = value
    assert before["max_num_seqs"] == 1
    if "kv_cache_memory_bytes" not in job:
        assert before["gpu_memory_utilization"] <= LEAST_UTILIZATION


@given(JOBS, st.integers(0, 20), st.integers(0, 20))
def test_each_step_up_takes_back_exactly_one_step(job: dict[str, Any], down: int, up: int) -> None:
    ladder = Ladder(stretch=1)
    seen = [dict(ladder.overrides)]
    for _ in range(down):
        options = {**job, **ladder.overrides}
        if ladder.step_down(options, options["max_num_seqs"]) is not None:
            seen.append(dict(ladder.overrides))
    for _ in range(up):
        if ladder.succeeded(2**40):
            ladder.step_up()
            seen.pop()
        assert ladder.overrides == seen[-1]


def test_success_never_goes_past_where_it_began() -> None:
    ladder = Ladder(stretch=10)
    assert not ladder.succeeded(10**6)
    ladder.step_down({}, 8)
    assert ladder.succeeded(10)
    ladder.step_up()
    assert ladder.overrides == {}
    assert not ladder.succeeded(10**6)


def test_the_stretch_is_counted_from_the_last_step_and_doubles_with_each_try() -> None:
    ladder = Ladder(stretch=100)
    ladder.step_down({}, 8)
    assert not ladder.succeeded(60)
    ladder.step_down({}, 4)
    assert not ladder.succeeded(60), "those before the step do not count"
    assert ladder.succeeded(40)
    ladder.step_up()
    ladder.step_down({}, 4)
    assert not ladder.succeeded(199)
    assert ladder.succeeded(1)


def test_overrides_are_all_steps_merged_the_last_one_wins() -> None:
    ladder = Ladder([{"max_num_seqs": 2}, {"max_num_seqs": 1}, {"max_num_batched_tokens": 1024}])
    assert ladder.overrides == {"max_num_seqs": 1, "max_num_batched_tokens": 1024}
    ladder.step_up()
    assert ladder.overrides == {"max_num_seqs": 1}


@pytest.mark.parametrize("remembered", [None, []])
def test_a_new_ladder_changes_nothing(remembered: list[dict[str, Any]] | None) -> None:
    assert Ladder(remembered).overrides == {}
