"""What is submitted comes back exactly once, whatever the engines under it do.

Real engines that are made to fail are in test_vllm_faults.py. Here a fake stands in for them, so
that thousands of schedules of deaths can be gone through, and every engine and request be counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from copy import deepcopy
from threading import Event, current_thread
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings

from batchkit.config.tables import JobConfig
from batchkit.engines.faults import EngineDied, FaultKind, StartFailed
from batchkit.engines.memory_ladder import Ladder
from batchkit.errors import EngineError, JobError
from batchkit.execution.bisection import PROOF
from batchkit.execution.events import Hear
from batchkit.execution.restart_thread import SearchTurn
from batchkit.types import Completion
from tests.support.counted_engines import (
    AT_LOAD,
    DEATHS,
    FAULTS,
    GIB,
    KILLED,
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
from tests.support.waiting import until


def check_every_request_comes_back(
    world: World, size: int, window: int, *, beside: SearchTurn | None = None
) -> None:
    options = {"max_num_seqs": size, "beside": beside}
    with closing(world.supervise(**options, max_engine_restarts=1000)) as engine:
        done = answer_all(engine, requests(0, 40), window=window)
    failed = kinds_of(done)
    assert failed.keys() >= known_kinds(world).keys()
    healthy = failed.keys() - known_kinds(world).keys()
    assert all(world.deaths_of[index] > PROOF for index in healthy)
    assert len(world.opened) == len(world.closed_with)


@given(WORLDS, DEATHS, SIZES, WINDOWS)
def test_every_request_comes_back_exactly_once_whenever_engines_die(
    world: World, deaths: dict[int, FaultKind], size: int, window: int
) -> None:
    world.dies_at = deaths
    check_every_request_comes_back(world, size, window)


@settings(max_examples=20)
@given(WORLDS, DEATHS, SIZES, WINDOWS)
def test_so_it_does_if_the_engine_is_restarted_in_a_thread(
    world: World, deaths: dict[int, FaultKind], size: int, window: int
) -> None:
    world.dies_at = deaths
    check_every_request_comes_back(world, size, window, beside=SearchTurn())


def test_an_engine_that_is_restarted_in_a_thread_lets_its_caller_work() -> None:
    world, may_load, threads = World(dies_at={1: "engine_crash"}), Event(), list[str]()
    open_one = world.open

    def open_later(job: JobConfig, hear: Hear) -> CountingEngine:
        threads.append(current_thread().name)
        if len(threads) > 1:
            assert may_load.wait(60)
        return open_one(job, hear)

    world.open = open_later  # type: ignore[method-assign]
    with closing(world.supervise(beside=SearchTurn())) as engine:
        for request in requests(0, 2):
            engine.submit(request)
        for _ in range(5):
            assert engine.poll(0.01) == []
        assert world.said == [
            "engine died (engine_crash) with 2 rows in flight: RuntimeError: planted"
        ]
        assert (engine.is_idle, engine.load().waiting) == (False, 2)
        may_load.set()
        back = list[Completion]()
        until(lambda: back.extend(engine.poll(0.01)) or len(back) == 2)
    assert threads[0] == current_thread().name != threads[1]


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_restart_is_ended_with_its_run(is_killed: bool) -> None:
    world, is_cancelled, loads = World(dies_at={1: "engine_crash"}), Event(), list[int]()
    open_one = world.open

    def open_later(job: JobConfig, hear: Hear) -> CountingEngine:
        loads.append(1)
        if len(loads) > 1:
            assert is_cancelled.wait(60)
            if is_killed:
                raise StartFailed("killed", FAULTS["engine_crash"], {})
        return open_one(job, hear)

    world.open = open_later  # type: ignore[method-assign]
    with closing(world.supervise(beside=SearchTurn())) as engine:
        engine.submit(requests(0, 1)[0])
        assert engine.poll(0.01) == engine.poll(0.01) == []
        engine.stop_restart(is_cancelled.set)
        assert not engine.is_idle
    assert len(loads) == 2, "it is not tried again"
    assert len(world.opened) == len(world.closed_with) == 2 - is_killed


def test_engines_on_one_gpu_replay_suspects_one_after_the_other() -> None:
    turn, worlds = SearchTurn(), [World(dies_at={1: "engine_crash"}) for _ in range(2)]
    with (
        closing(worlds[0].supervise(beside=turn)) as first,
        closing(worlds[1].supervise(beside=turn)) as second,
    ):
        for engine in (first, second):
            for request in requests(0, 2):
                engine.submit(request)
            assert engine.poll(0.01) == []
        until(lambda: first.poll(0.01))
        for _ in range(20):
            assert second.poll(0.01) == []
        assert worlds[1].submitted == [0, 1], "it has replayed none"
        until(lambda: first.poll(0.01))
        until(lambda: second.poll(0.01))


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
        pytest.raises(EngineError, match="died 17 times without an answer"),
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
        with pytest.raises(EngineError, match=r"died 4 times .* the last time: the GPU is gone"):
            answer_all(engine, requests(0, 8))
    assert set(world.closed_with) == {0}


@pytest.mark.parametrize(
    "error",
    [StartFailed("no port", FAULTS["engine_crash"], {}), JobError("the hub can't be reached")],
)
def test_an_engine_that_came_up_before_is_opened_again_until_it_does(error: Exception) -> None:
    world = World(dies_at={1: "engine_crash"})
    open_one = world.open

    def open_the_fourth_time(job: JobConfig, hear: Hear) -> CountingEngine:
        if world.opened and len(world.failed_loads) < 2:
            world.failed_loads.append(0)
            raise error
        return open_one(job, hear)

    world.open = open_the_fourth_time  # type: ignore[method-assign]
    with closing(world.supervise()) as engine:
        assert kinds_of(answer_all(engine, requests(0, 8))) == {}
    assert world.said[1:] == [f"the next engine did not start: {error}"] * 2


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
        "row 1 (id id-1) kills the engine even if it runs alone: the row has failed",
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


class Case(NamedTuple):
    """What happens to an engine for ``size`` rows at once; the steps that are taken in the end, and
    ``opened``, the sizes of all engines, where that is certain."""

    world: World
    steps: list[dict[str, int]]
    opened: list[int] | None = None
    failed: dict[int, str] = {}  # noqa: RUF012
    size: int = 8
    rows: int = 40
    window: int = 10**9
    before: Sequence[dict[str, int]] = ()


def to(*sizes: int) -> list[dict[str, int]]:
    return [{"max_num_seqs": size} for size in sizes]


CASES = {
    "too many at once": Case(World(over=3), to(8, 4, 2), [16, 8, 4, 2], size=16),
    "at load": Case(World(load_over=2), to(4, 2), [2]),
    "a row alone": Case(
        World(dies_at={1: "oom"}, batched_tokens=4096), [{"max_num_batched_tokens": 2048}], rows=1
    ),
    "a crash and a stall": Case(World(dies_at={1: "engine_crash", 2: "stall"}), [], [8, 8, 8]),
    "a kill without a sign of memory": Case(World(killed_at={1}, a_poll=1), [], [8, 8]),
    "a second kill in a row": Case(World(killed_at={1, 20}, a_poll=1), to(4), [8, 8, 4]),
    "kills with a stretch of success between them": Case(
        World(killed_at={1, 1100}, a_poll=1), [], [8, 8, 8], rows=1200
    ),
    "kills with another death between them": Case(
        World(killed_at={1, 20}, dies_at={10: "engine_crash"}, a_poll=1), [], [8] * 4
    ),
    "a row that has its engine killed": Case(
        World(poison={3: "kill"}), [], failed={3: "oom"}, rows=8
    ),
    "steps that a poison row cost": Case(World(poison={3: "oom"}), [], failed={3: "oom"}, rows=8),
    "… though an earlier one is remembered": Case(
        World(poison={3: "oom"}), to(6), failed={3: "oom"}, rows=8, before=to(6)
    ),
    "a poison row after steps of an earlier search": Case(
        World(over=4, poison={30: "oom"}), to(8, 4), failed={30: "oom"}, size=16, window=8
    ),
    "a step that no poison row cost": Case(
        World(over=7, poison={3: "engine_crash"}),
        to(8),
        failed={3: "engine_crash"},
        size=16,
        rows=16,
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_memory_that_runs_out_halves_the_batch_and_nothing_else_does(
    case: Case,
) -> None:
    world, steps, opened, failed, size, rows, window, before = deepcopy(case)
    with closing(world.supervise(max_num_seqs=size, ladder=Ladder(before))) as engine:
        assert kinds_of(answer_all(engine, requests(0, rows), window=window)) == failed
        assert engine.ladder.reductions == steps
        assert engine.restarts == len(world.opened) - 1
    assert opened is None or world.opened == opened
    if failed:
        assert engine.restarts <= math.log2(rows) + PROOF + 1
    told = [text for text in world.said if text.startswith("out of memory")]
    said = [f"{name} = {value}" for step in steps for name, value in step.items()]
    assert all(any(text.endswith(last) for text in told) for last in said[len(before) :])


def test_an_engine_that_is_killed_at_load_is_tried_once_more_as_it_was() -> None:
    world = World()
    open_one = world.open

    def killed_at_first(job: JobConfig, hear: Hear) -> CountingEngine:
        if not world.failed_loads:
            world.failed_loads.append(job.engine.options["max_num_seqs"])
            raise StartFailed("its process died", KILLED, {})
        return open_one(job, hear)

    world.open = killed_at_first  # type: ignore[method-assign]
    with closing(world.supervise()) as engine:
        assert engine.ladder.reductions == []
    assert (world.failed_loads, world.opened) == ([8], [8])


def test_an_engine_that_grew_too_large_is_replaced_between_rows() -> None:
    world = World(host_bytes=GIB, grows_bytes=GIB // 4, a_poll=1)
    with closing(world.supervise(max_host_gb=1.5)) as engine:
        answer_all(engine, requests(0, 30), window=4)
        assert engine.restarts >= 3
    assert set(world.closed_with) == {0}
    assert world.submitted == list(range(30))
    restart = "engine restart: the engine's process uses 1.8 GiB (run.max_host_gb = 1.5)"
    assert world.said.count(restart) == len(world.opened) - 1
    assert world.opened[:3] == [8, 8, 4], "the second time so soon, the batch is made smaller"


NO_HELP = "a new engine already uses {} GiB (run.max_host_gb = 1.5): a restart would not help; raise run.max_host_gb"


@pytest.mark.parametrize(
    ("max_host_gb", "holds", "said"),
    [
        (1.5, {"host_bytes": 2 * GIB, "grows_bytes": GIB // 4}, [NO_HELP.format(2.2)]),
        # A ProcessEngine's load is 0 bytes until its process has reported a first turn.
        (1.5, {"host_bytes": 2 * GIB, "first_look": 0}, [NO_HELP.format("2.0")]),
        (None, {"host_bytes": 2 * GIB}, []),
        (2.5, {"host_bytes": 2 * GIB}, []),
    ],
    ids=["too large from the start", "first seen late", "no limit", "within it"],
)
def test_an_engine_is_not_restarted_where_that_helps_nothing(
    max_host_gb: float | None, holds: dict[str, int], said: list[str]
) -> None:
    world = World(a_poll=1, **holds)  # type: ignore[arg-type]
    with closing(world.supervise(max_host_gb=max_host_gb)) as engine:
        answer_all(engine, requests(0, 12), window=4)
        assert engine.restarts == 0
    assert world.said == said


def test_what_one_engine_began_with_says_nothing_about_the_next() -> None:
    world = World(host_bytes=2 * GIB, a_poll=1)
    with closing(world.supervise(max_host_gb=1.5)) as engine:
        answer_all(engine, requests(0, 4), window=1)
        assert engine.restarts == 0
        world.host_bytes, world.grows_bytes = GIB, GIB // 4
        world.dies_at = {world.polls + 1: "engine_crash"}
        answer_all(engine, requests(4, 12), window=1)
        assert engine.restarts > 1
    assert (
        world.said[-1]
        == "engine restart: the engine's process uses 1.8 GiB (run.max_host_gb = 1.5)"
    )


DIED, UNSEEN = StartFailed("it died", KILLED, {}), StartFailed("it died", AT_LOAD, {})


@pytest.mark.parametrize(
    ("world", "asked", "tried"),
    [
        (World(load_over=0), 8, [8, 4, 2, 1]),
        (World(load_error=DIED), 8, [8, 8, 4, 2, 1]),  # the first time says nothing
        # Before it reported its limits: 256 is what vLLM takes where the job says nothing.
        (World(load_error=UNSEEN), 24, [24, 12, 6, 3, 1]),
        (World(load_error=UNSEEN), None, [None, 128, 64, 32, 16, 8, 4, 2, 1]),
    ],
    ids=["memory", "killed", "killed for memory", "unknown limits"],
)
def test_memory_that_runs_out_at_every_load_ends_with_the_engines_own_error(
    world: World, asked: int | None, tried: list[int | None]
) -> None:
    with pytest.raises(StartFailed, match=r"^(can't be loaded|it died)$") as raised:
        world.supervise(max_num_seqs=asked)
    assert world.load_error in (None, raised.value)
    assert world.failed_loads == tried


def test_steps_that_never_helped_are_not_remembered() -> None:
    world = World(dies_at=dict.fromkeys(range(1, 40), "oom"))
    kept: list[Any] = []
    engine = world.supervise(
        max_engine_restarts=3, remember=lambda history: kept.append(list(history.reductions))
    )
    with closing(engine), pytest.raises(EngineError):
        answer_all(engine, requests(0, 40))
    assert kept[0] == [{"max_num_seqs": 4}], "at once, lest the kernel end the run as well"
    assert kept[-1] == []
