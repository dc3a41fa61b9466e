"""Smaller engines after memory ran out."""

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
    Ladder,
)

FULL = Fault("oom", "OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB.")
ON_DEVICE = "Free memory on device cuda:0 (3.2/79.2 GiB) on startup is less than desired GPU memory"
OVER_CLAIM = Fault("oom", "ValueError", f"{ON_DEVICE} utilization (0.9, 71.3 GiB). Decrease GPU m")
WITHOUT_CACHE = Fault("oom", "ValueError", "No available memory for the cache blocks. Try")

CLAIMS = SHARE, CACHE = "gpu_memory_utilization", "kv_cache_memory_bytes"


def all_the_way_down(limits: Mapping[str, Any], fault: Fault) -> list[dict[str, Any]]:
    """Every step that the ladder has for an engine which dies of ``fault`` each time."""
    ladder = Ladder()
    while ladder.reduce({**limits, **ladder.overrides}, fault) is not None:
        assert len(ladder.reductions) < 1000
    return ladder.reductions


def shares(lowest: float) -> list[dict[str, Any]]:
    return [{"gpu_memory_utilization": round(lowest + part, 2)} for part in (0.2, 0.1, 0.0)]


SEQS = {"max_num_seqs": 8, "max_num_batched_tokens": 3000}


def steps(**values: list[Any]) -> list[dict[str, Any]]:
    return [{name: value} for name, its in values.items() for value in its]


@pytest.mark.parametrize(
    ("limits", "fault", "reductions"),
    [
        (  # requests at once, then tokens, then the share of the GPU
            {"max_num_seqs": 9, "max_num_batched_tokens": 3000, SHARE: 0.75},
            FULL,
            steps(
                max_num_seqs=[4, 2, 1],
                max_num_batched_tokens=[1500, 750, LEAST_BATCHED_TOKENS],
                gpu_memory_utilization=[0.65, 0.55],
            ),
        ),
        (  # a fixed KV cache in place of the share
            {"max_num_seqs": 2, CACHE: 4 * LEAST_CACHE_BYTES + 1},
            FULL,
            steps(
                max_num_seqs=[1], kv_cache_memory_bytes=[2 * LEAST_CACHE_BYTES, LEAST_CACHE_BYTES]
            ),
        ),
        # more asked for than is free: the claim alone, and lower than where the batch is too large
        ({**SEQS, SHARE: 0.45}, OVER_CLAIM, steps(gpu_memory_utilization=[0.35, 0.25, 0.15])),
        ({**SEQS, CACHE: 2 * LEAST_CACHE_BYTES}, OVER_CLAIM, [{CACHE: LEAST_CACHE_BYTES}]),
        (  # no room for a KV cache: less would not help
            {"max_num_seqs": 2, "max_num_batched_tokens": 1000, SHARE: 0.9},
            WITHOUT_CACHE,
            steps(max_num_seqs=[1], max_num_batched_tokens=[LEAST_BATCHED_TOKENS]),
        ),
        *(  # each claim has its own least
            ({"max_num_seqs": 1, SHARE: 0.3 + lowest}, fault, shares(lowest))
            for fault, lowest in ((FULL, LEAST_SHARE), (OVER_CLAIM, LEAST_SHARE_FREE))
        ),
        *(
            (limits, fault, [])
            for fault in (FULL, OVER_CLAIM, WITHOUT_CACHE)
            for limits in ({}, {"max_num_seqs": 1, CACHE: 1})
        ),
    ],
)
def test_the_way_down(
    limits: dict[str, Any], fault: Fault, reductions: list[dict[str, Any]]
) -> None:
    assert all_the_way_down(limits, fault) == reductions


@pytest.mark.parametrize(
    ("limits", "fault"),
    [
        ({"max_num_seqs": 1, "kv_cache_memory_bytes": 400 * 2**30}, OVER_CLAIM),
        ({"gpu_memory_utilization": 0.9}, OVER_CLAIM),
        ({"max_num_seqs": 8}, FULL),
    ],
)
def test_a_step_that_the_engine_does_not_obey_ends_the_way_down(
    limits: dict[str, Any], fault: Fault
) -> None:
    ladder = Ladder()
    assert ladder.reduce(limits, fault) is not None
    assert ladder.reduce(limits, fault) is None
    assert len(ladder.reductions) == 1


def test_after_the_claim_the_way_down_goes_on_as_the_next_fault_asks() -> None:
    ladder, limits = Ladder(), {"max_num_seqs": 8, "gpu_memory_utilization": 0.9}
    for fault in (OVER_CLAIM, FULL, WITHOUT_CACHE, OVER_CLAIM):
        ladder.reduce({**limits, **ladder.overrides}, fault)
    batch = steps(max_num_seqs=[4, 2])
    assert ladder.reductions == [{SHARE: 0.8}, *batch, {SHARE: 0.7}]


BATCHES = st.fixed_dictionaries(
    {"max_num_seqs": st.integers(1, 1024)},
    optional={"max_num_batched_tokens": st.integers(1, 65536)},
)
CLAIMED = st.fixed_dictionaries({SHARE: st.floats(0.05, 1.0)})
CLAIMED |= st.fixed_dictionaries({CACHE: st.integers(1, 2**40)})
LIMITS = st.builds(lambda batch, claim: {**batch, **claim}, BATCHES, CLAIMED)
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


def test_a_request_alone_gets_fewer_tokens_at_a_time_but_one_for_each_that_may_run() -> None:
    limits = {"max_num_seqs": 1024, "max_num_batched_tokens": 2048, "gpu_memory_utilization": 0.9}
    ladder, fault = Ladder(), Fault("oom", "OutOfMemoryError", "planted")
    assert ladder.reduce(limits, fault, alone=True) == {"max_num_batched_tokens": 1024}
    limits |= ladder.overrides
    assert ladder.reduce(limits, fault, alone=True) == {"gpu_memory_utilization": 0.8}
