"""What is submitted comes back exactly once, whatever the engines under it do.

Real engines that are made to fail are in test_vllm_faults.py. Here a fake stands in for them, so
that thousands of schedules of deaths can be gone through, and every engine and request be counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchkit.config import JobConfig
from batchkit.engines.base import EngineLoad
from batchkit.errors import EngineError, JobError, RequestError
from batchkit.faults import EngineDied, Fault, FaultKind
from batchkit.ladder import Ladder
from batchkit.supervisor import SupervisedEngine
from batchkit.types import Choice, Completion, Request, Row

FAULTS: dict[FaultKind, Fault] = {
    "oom": Fault("oom", "OutOfMemoryError", "planted"),
    "engine_crash": Fault("engine_crash", "RuntimeError", "planted"),
    "stall": Fault("stall", "stall", "planted"),
}


@dataclass
class World:
    """What befalls the engines, and what is counted over all of them.

    ``over``: with more running than this, memory runs out; ``load_over``: so it does at load with
    a larger ``max_num_seqs``. ``dies_at`` are polls, counted over all engines.
    """

    poison: dict[int, FaultKind] = field(default_factory=dict)
    dies_at: dict[int, FaultKind] = field(default_factory=dict)
    refuses: set[int] = field(default_factory=set)
    over: int = 10**9
    load_over: int = 10**9
    a_poll: int = 10**9
    rss_bytes: int = 0
    load_error: Exception | None = None

    polls: int = 0
    opened: list[int] = field(default_factory=list)
    """``max_num_seqs`` of each engine."""
    failed_loads: list[int] = field(default_factory=list)
    closed_with: list[int] = field(default_factory=list)
    """What was in flight in each engine when it was closed; a dead one has nothing."""
    submitted: list[int] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def open(self, job: JobConfig) -> CountingEngine:
        assert len(self.opened) == len(self.closed_with), "two engines would share one GPU"
        size = job.engine.options["max_num_seqs"]
        if self.load_error is not None:
            self.failed_loads.append(size)
            raise self.load_error
        if size > self.load_over:
            self.failed_loads.append(size)
            raise EngineError("can't be loaded") from MemoryError("planted")
        self.opened.append(size)
        return CountingEngine(self, size)

    def supervise(
        self, *, max_num_seqs: int = 8, ladder: Ladder | None = None, **run: Any
    ) -> SupervisedEngine:
        engine = {
            "model": "none",
            "options": {"max_num_seqs": max_num_seqs, "kv_cache_memory_bytes": 1},
        }
        job = JobConfig(engine=engine, run=run)
        return SupervisedEngine(job, self.said.append, ladder=ladder, open_engine=self.open)


class CountingEngine:
    """A fake: answers ``world.a_poll`` of what it runs, or dies as ``world`` says."""

    versions: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, world: World, max_num_seqs: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.rss_bytes = world.rss_bytes
        self._world = world
        self._queue: list[Request] = []
        self._dead = self._closed = False

    def submit(self, request: Request) -> None:
        assert not self._dead
        self._world.submitted.append(request.row.index)
        self._queue.append(request)

    def poll(self, timeout_s: float) -> Sequence[Completion]:
        assert not self._dead
        world = self._world
        world.polls += 1
        running = self._queue[: self.max_num_seqs]
        kinds = [world.poison[r.row.index] for r in running if r.row.index in world.poison]
        if world.polls in world.dies_at:
            kinds.append(world.dies_at[world.polls])
        if len(running) > world.over:
            kinds.append("oom")
        if kinds:
            self._dead = True
            raise EngineDied(FAULTS[kinds[0]])
        done = running[: world.a_poll]
        del self._queue[: len(done)]
        return [self._answer(request) for request in done]

    def _answer(self, request: Request) -> Completion:
        if request.row.index in self._world.refuses:
            return Completion(request, error=RequestError("refused"))
        return Completion(request, [Choice("tea", "stop")])

    def load(self) -> EngineLoad:
        return EngineLoad(min(len(self._queue), self.max_num_seqs), 0, 0.0, 0)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._world.closed_with.append(0 if self._dead else len(self._queue))


def requests(start: int, stop: int) -> list[Request]:
    return [Request(Row(n, f"id-{n}", {}), None, "tea", {}, "") for n in range(start, stop)]


def answer_all(
    engine: SupervisedEngine, rows: Sequence[Request], *, window: int = 10**9
) -> list[Completion]:
    """As the processor does it: fill the window, poll, until every one is back."""
    waiting = list(rows)
    done: list[Completion] = []
    for _ in range(200 * len(rows) + 200):
        while waiting and len(rows) - len(waiting) - len(done) < window:
            engine.submit(waiting.pop(0))
        if len(done) == len(rows):
            break
        done += engine.poll(0.01)
    assert engine.poll(0.01) == [], "nothing comes back twice"
    assert sorted(id(c.request) for c in done) == sorted(map(id, rows)), "each one once"
    return done


def kinds_of(done: Sequence[Completion]) -> dict[int, str]:
    return {c.request.row.index: c.error.kind for c in done if c.error is not None}


KINDS: st.SearchStrategy[FaultKind] = st.sampled_from(["oom", "engine_crash", "stall"])
WORLDS = st.builds(
    World,
    poison=st.dictionaries(st.integers(0, 39), KINDS, max_size=6),
    refuses=st.sets(st.integers(0, 39), max_size=6),
    over=st.integers(1, 20),
    a_poll=st.integers(1, 20),
)
DEATHS = st.dictionaries(st.integers(1, 60), KINDS, max_size=12)
SIZES = st.integers(1, 16)
WINDOWS = st.integers(1, 40)


def known_kinds(world: World) -> dict[int, str]:
    """A row that stalls the engine kills it as much as one that crashes it."""
    return dict.fromkeys(world.refuses, "invalid_request") | {
        index: "oom" if kind == "oom" else "engine_crash" for index, kind in world.poison.items()
    }


@given(WORLDS, SIZES, WINDOWS)
def test_poison_rows_alone_fail(world: World, size: int, window: int) -> None:
    with closing(world.supervise(max_num_seqs=size, max_engine_restarts=1000)) as engine:
        done = answer_all(engine, requests(0, 40), window=window)
        assert engine.restarts == len(world.opened) - 1
    assert kinds_of(done) == known_kinds(world)


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
    assert kinds_of(done).keys() >= known_kinds(world).keys()
    assert len(world.opened) == len(world.closed_with)


@given(st.integers(1, 60), KINDS, SIZES, WINDOWS)
def test_a_death_that_does_not_repeat_costs_no_row(
    poll: int, kind: FaultKind, size: int, window: int
) -> None:
    world = World(dies_at={poll: kind}, a_poll=2)
    with closing(world.supervise(max_num_seqs=size)) as engine:
        assert kinds_of(answer_all(engine, requests(0, 40), window=window)) == {}


def test_new_requests_wait_for_the_end_of_a_search_and_keep_their_order() -> None:
    world = World(poison={2: "engine_crash"})
    with closing(world.supervise()) as engine:
        for request in requests(0, 8):
            engine.submit(request)
        assert engine.poll(0.01) == []
        late = requests(8, 14)
        for request in late[:3]:
            engine.submit(request)
        done: list[Completion] = []
        while len(done) < 8:
            done += engine.poll(0.01)
        assert kinds_of(done) == {2: "engine_crash"}
        assert max(world.submitted) < 8, "none of the late ones ran beside a suspect"
        for request in late[3:]:
            engine.submit(request)
        assert [c.request for c in engine.poll(0.01)] == late
    assert world.submitted[-6:] == list(range(8, 14))


def test_memory_that_runs_out_halves_the_batch_until_it_fits_and_that_is_remembered() -> None:
    world = World(over=3)
    with closing(world.supervise(max_num_seqs=16)) as engine:
        assert kinds_of(answer_all(engine, requests(0, 40))) == {}
        assert engine.ladder.steps == [{"max_num_seqs": n} for n in (8, 4, 2)]
        assert engine.max_num_seqs == 2
        assert engine.restarts == 3
    assert world.opened == [16, 8, 4, 2]
    assert "out of memory: next engine with max_num_seqs = 2" in world.said


def test_a_crash_does_not_make_the_batch_smaller() -> None:
    world = World(dies_at={1: "engine_crash", 2: "stall"})
    with closing(world.supervise()) as engine:
        answer_all(engine, requests(0, 8))
        assert engine.ladder.steps == []
    assert world.opened == [8, 8, 8]


@pytest.mark.parametrize("remembered", [[], [{"max_num_seqs": 6}]])
def test_steps_that_a_poison_row_cost_are_taken_back(remembered: list[dict[str, Any]]) -> None:
    world = World(poison={3: "oom"})
    with closing(world.supervise(ladder=Ladder(list(remembered)))) as engine:
        assert kinds_of(answer_all(engine, requests(0, 8))) == {3: "oom"}
        assert engine.ladder.steps == remembered
    assert min(world.opened) < world.opened[0] == world.opened[-1]


def test_the_engine_grows_by_one_step_between_rows_after_a_stretch_of_success() -> None:
    world = World(a_poll=1)
    ladder = Ladder([{"max_num_seqs": 4}, {"max_num_seqs": 2}], stretch=10)
    with closing(world.supervise(ladder=ladder)) as engine:
        answer_all(engine, requests(0, 40), window=5)
        assert ladder.steps == [], "10 answers for the first step, 20 for the second"
        assert engine.max_num_seqs == 8
    assert world.opened == [2, 4, 8]
    assert world.closed_with == [0, 0, 0], "no row lost what it had generated"
    assert world.submitted == list(range(40)), "none was submitted twice"
    assert world.said == [
        "engine restart: a stretch of success, one step up to max_num_seqs = 4",
        "engine restart: a stretch of success, one step up to the job's own settings",
    ]


def test_growth_that_proves_too_much_is_tried_half_as_often() -> None:
    world = World(load_over=4)
    with closing(world.supervise(ladder=Ladder([{"max_num_seqs": 4}], stretch=4))) as engine:
        answer_all(engine, requests(0, 30), window=1)
        assert engine.ladder.steps == [{"max_num_seqs": 4}]
    assert len(world.failed_loads) == 3, "after 4, 8 and 16 answers"
    assert world.opened == [4] * 4


def test_an_engine_that_holds_too_much_memory_is_replaced_between_rows() -> None:
    world = World(rss_bytes=2 * 2**30, a_poll=1)
    with closing(world.supervise(max_host_gb=1.5)) as engine:
        answer_all(engine, requests(0, 12), window=4)
        assert engine.restarts == 3
        assert engine.ladder.steps == []
    assert set(world.closed_with) == {0}
    assert world.submitted == list(range(12))
    assert set(world.said) == {"engine restart: its process holds 2.0 GiB (run.max_host_gb = 1.5)"}


@pytest.mark.parametrize("max_host_gb", [None, 2.5])
def test_an_engine_within_its_memory_is_left_alone(max_host_gb: float | None) -> None:
    world = World(rss_bytes=2 * 2**30)
    with closing(world.supervise(max_host_gb=max_host_gb)) as engine:
        answer_all(engine, requests(0, 12))
        assert engine.restarts == 0


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


def test_one_answer_is_enough_to_go_on() -> None:
    world = World(dies_at=dict.fromkeys(range(2, 80, 2), "engine_crash"), a_poll=1)
    with closing(world.supervise(max_engine_restarts=1)) as engine:
        answer_all(engine, requests(0, 30))
        assert engine.restarts > 20


def test_memory_that_runs_out_at_load_steps_down_until_it_opens() -> None:
    world = World(load_over=2)
    with closing(world.supervise()) as engine:
        assert engine.ladder.steps == [{"max_num_seqs": 4}, {"max_num_seqs": 2}]
        assert engine.restarts == 0
    assert (world.failed_loads, world.opened) == ([8, 4], [2])
    assert world.said == [
        f"out of memory at load (MemoryError: planted): next try with max_num_seqs = {n}"
        for n in (4, 2)
    ]


def test_memory_that_runs_out_at_every_load_ends_with_the_engines_own_error() -> None:
    world = World(load_over=0)
    with pytest.raises(EngineError, match=r"^can't be loaded$"):
        world.supervise()
    assert world.failed_loads == [8, 4, 2, 1]


@pytest.mark.parametrize(
    "error", [EngineError("a weight file is damaged"), JobError("no such option")]
)
def test_other_errors_at_load_are_raised_at_once(error: Exception) -> None:
    world = World(load_error=error)
    with pytest.raises(type(error)) as raised:
        world.supervise()
    assert raised.value is error
    assert (world.failed_loads, world.said) == ([8], [])


def plain_error(cause: Exception) -> Callable[[float], Sequence[Completion]]:
    """An engine in this process dies with its own error, not with EngineDied."""

    def poll(timeout_s: float) -> Sequence[Completion]:
        raise EngineError("vLLM failed") from cause

    return poll


def test_an_engine_in_this_process_dies_by_its_cause() -> None:
    world = World()
    opened = world.open

    def open_one(job: JobConfig) -> CountingEngine:
        engine = opened(job)
        if len(world.opened) == 1:
            engine.poll = plain_error(MemoryError("planted"))  # type: ignore[assignment, method-assign]
        return engine

    world.open = open_one  # type: ignore[method-assign]
    with closing(world.supervise()) as engine:
        answer_all(engine, requests(0, 8))
        assert engine.ladder.steps == [{"max_num_seqs": 4}]


def test_each_event_is_said_in_one_line() -> None:
    world = World(poison={1: "oom"})
    with closing(world.supervise(max_num_seqs=2)) as engine:
        answer_all(engine, requests(0, 2))
    assert world.said == [
        "engine died (oom) with 2 rows in flight: OutOfMemoryError: planted",
        "out of memory: next engine with max_num_seqs = 1",
        "engine died (oom) with 1 rows in flight: OutOfMemoryError: planted",
        "row 1 (id id-1) alone kills the engine: failed",
    ]


def test_an_idle_engine_that_dies_is_replaced() -> None:
    world = World(dies_at={1: "engine_crash"})
    with closing(world.supervise()) as engine:
        assert engine.poll(0.01) == []
        assert engine.restarts == 1
        assert kinds_of(answer_all(engine, requests(0, 3))) == {}


def test_it_may_be_closed_twice() -> None:
    world = World()
    engine = world.supervise()
    engine.close()
    engine.close()
    assert world.closed_with == [0]
