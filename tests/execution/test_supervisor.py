"""What is submitted comes back exactly once, whatever the engines under it do.

Real engines that are made to fail are in test_vllm_faults.py. Here a fake stands in for them, so
that thousands of schedules of deaths can be gone through, and every engine and request be counted.
"""

from __future__ import annotations

from contextlib import closing

import pytest
from hypothesis import given

from batchkit.config.tables import JobConfig
from batchkit.engines.faults import EngineDied, FaultKind, StartFailed
from batchkit.engines.memory_ladder import Ladder
from batchkit.errors import EngineError, JobError
from batchkit.execution.bisection import PROOF
from batchkit.execution.events import EngineHistory
from tests.support.counted_engines import (
    DEATHS,
    FAULTS,
    SIZES,
    WINDOWS,
    WORLDS,
    CountingEngine,
    World,
    answer_all,
    kinds_of,
    known_kinds,
    requests,
)


@given(WORLDS, DEATHS, SIZES, WINDOWS)
def test_every_request_comes_back_exactly_once_whenever_engines_die(
    world: World, deaths: dict[int, FaultKind], size: int, window: int
) -> None:
    world.dies_at = deaths
    ladder = Ladder(stretch=5)  # so that planned restarts fall in between
    with closing(
        world.supervise(max_num_seqs=size, ladder=ladder, max_engine_restarts=1000)
    ) as engine:
        done = answer_all(engine, requests(0, 40), window=window)
    failed = kinds_of(done)
    assert failed.keys() >= known_kinds(world).keys()
    healthy = failed.keys() - known_kinds(world).keys()
    assert all(world.deaths_of[index] > PROOF for index in healthy)
    assert len(world.opened) == len(world.closed_with)


def test_that_accidents_happen_is_remembered_for_the_next_start() -> None:
    history: list[EngineHistory] = []
    world = World(dies_at={2: "engine_crash", 9: "engine_crash"})
    with closing(world.supervise(remember=history.append)) as engine:
        answer_all(engine, requests(0, 40), window=4)
    assert [entry.among_accidents for entry in history] == [False, True, True, True], (
        "before each engine, and at the end of each search"
    )


def test_a_run_without_one_answer_ends_with_the_last_fault() -> None:
    world = World(dies_at=dict.fromkeys(range(1, 4), "oom") | {4: "engine_crash"})
    with (
        closing(world.supervise(max_engine_restarts=3)) as engine,
        pytest.raises(
            EngineError, match=r"died 4 times .*max_engine_restarts.* RuntimeError: planted"
        ),
    ):
        answer_all(engine, requests(0, 40))
    assert len(world.opened) == 4


@pytest.mark.parametrize(
    "world",
    [World(dies_at={1: "oom"}), World(dies_at={1: "engine_crash"}), World(load_over=4)],
)
def test_without_restarts_the_first_death_is_raised_as_it_is(world: World) -> None:
    with (
        pytest.raises(EngineDied, match=r"planted|can't be loaded"),
        closing(world.supervise(max_num_seqs=8, max_engine_restarts=0)) as engine,
    ):
        answer_all(engine, requests(0, 40))
    assert len(world.opened) + len(world.failed_loads) == 1


@pytest.mark.parametrize("window", [1, 8, 384])
def test_an_engine_that_dies_of_every_row_ends_the_run(window: int) -> None:
    world = World(poison=dict.fromkeys(range(800), "engine_crash"))
    with (
        closing(world.supervise(max_engine_restarts=16)) as engine,
        pytest.raises(EngineError, match="died 17 times without one answer"),
    ):
        answer_all(engine, requests(0, 800), window=window)
    assert len(world.opened) == 17


def test_one_answer_is_enough_to_go_on() -> None:
    world = World(dies_at=dict.fromkeys(range(2, 80, 2), "engine_crash"), a_poll=1)
    with closing(world.supervise(max_engine_restarts=1)) as engine:
        answer_all(engine, requests(0, 30))
        assert engine.restarts > 20


@pytest.mark.parametrize(
    "error",
    [
        StartFailed("a weight file is damaged", FAULTS["engine_crash"], {"max_num_seqs": 8}),
        StartFailed("it hangs", FAULTS["stall"], {"max_num_seqs": 8}),
        JobError("no such option"),
    ],
)
def test_other_errors_at_load_are_raised_at_once(error: Exception) -> None:
    world = World(load_error=error)
    with pytest.raises(type(error)) as raised:
        world.supervise()
    assert raised.value is error
    assert (world.failed_loads, world.said) == ([8], [])


def test_an_engine_that_can_not_be_opened_again_ends_the_run() -> None:
    world = World(dies_at={1: "engine_crash"})
    with closing(world.supervise(max_engine_restarts=3)) as engine:
        world.load_error = StartFailed("the GPU is gone", FAULTS["engine_crash"], {})
        with pytest.raises(EngineError, match=r"died 4 times .* last: the GPU is gone"):
            answer_all(engine, requests(0, 8))
    assert set(world.closed_with) == {0}


@pytest.mark.parametrize(
    "error",
    [StartFailed("no port", FAULTS["engine_crash"], {}), JobError("the hub can't be reached")],
)
def test_an_engine_that_came_up_before_is_opened_again_until_it_does(error: Exception) -> None:
    world = World(dies_at={1: "engine_crash"})
    open_one = world.open

    def open_the_fourth_time(job: JobConfig) -> CountingEngine:
        if world.opened and len(world.failed_loads) < 2:
            world.failed_loads.append(0)
            raise error
        return open_one(job)

    world.open = open_the_fourth_time  # type: ignore[method-assign]
    with closing(world.supervise()) as engine:
        assert kinds_of(answer_all(engine, requests(0, 8))) == {}
    assert world.said[1:] == [f"the next engine did not come up: {error}"] * 2


@pytest.mark.parametrize("stacks", ["Thread 1 (idle)\n    poll (engine.py:1)\n", ""])
def test_the_stacks_of_a_stalled_engine_are_noted_and_not_said(stacks: str) -> None:
    world = World(dies_at={1: "stall"}, stacks=stacks)
    with closing(world.supervise()) as engine:
        answer_all(engine, requests(0, 8))
    assert world.noted == [stacks] * bool(stacks)
    assert world.said == ["engine died (stall) with 8 rows in flight: stall: planted"]


def test_each_event_is_said_in_one_line() -> None:
    world = World(poison={1: "oom"})
    with closing(world.supervise(max_num_seqs=2)) as engine:
        answer_all(engine, requests(0, 2))
    assert world.said == [
        "engine died (oom) with 2 rows in flight: OutOfMemoryError: planted",
        "out of memory (OutOfMemoryError: planted): next engine with max_num_seqs = 1",
        *["engine died (oom) with 1 row in flight: OutOfMemoryError: planted"] * 2,
        "row 1 (id id-1) alone kills the engine: failed",
    ]


def test_an_idle_engine_that_dies_is_replaced() -> None:
    world = World(dies_at={1: "engine_crash"})
    with closing(world.supervise()) as engine:
        assert engine.poll(0.01) == []
        assert engine.restarts == 0, "as long as there is nothing to do"
        assert kinds_of(answer_all(engine, requests(0, 3))) == {}
        assert engine.restarts == 1


def test_the_engines_own_limits_are_passed_on_and_it_may_be_closed_twice() -> None:
    world = World()
    engine = world.supervise()
    assert engine.limits == {"max_num_seqs": 8, "kv_cache_memory_bytes": 1}
    assert (engine.max_num_seqs, engine.versions) == (8, {})
    engine.close()
    engine.close()
    assert world.closed_with == [0]
