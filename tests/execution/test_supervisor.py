"""What is submitted comes back exactly once, whatever the engines under it do.

Real engines that are made to fail are in test_vllm_faults.py. Here a fake stands in for them, so
that thousands of schedules of deaths can be gone through, and every engine and request be counted.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchkit.config.tables import JobConfig
from batchkit.engines.base import EngineLoad
from batchkit.engines.faults import EngineDied, Fault, FaultKind, StartFailed, fault_of_exit
from batchkit.engines.memory_ladder import Ladder
from batchkit.errors import EngineError, JobError, RequestError
from batchkit.execution.bisection import PROOF, Suspicion
from batchkit.execution.events import EngineHistory, Event, Note
from batchkit.execution.supervisor import GROWTH_SHARE, SupervisedEngine
from batchkit.types import Choice, Completion, Request, Row

FAULTS: dict[FaultKind, Fault] = {
    "oom": Fault("oom", "OutOfMemoryError", "planted"),
    "engine_crash": Fault("engine_crash", "RuntimeError", "planted"),
    "stall": Fault("stall", "stall", "planted"),
}
KILLED = fault_of_exit(-signal.SIGKILL, "")
AT_LOAD = Fault("oom", "MemoryError", "planted")
GIB = 2**30


@dataclass
class World:
    """What happens to the engines, and what is counted over all of them.

    ``over``: with more running than this, memory runs out; ``load_over``: so it does at load with
    a larger ``max_num_seqs``. ``dies_at`` are polls, counted over all engines. ``first_look`` is
    what an engine's process holds when its load is first asked for; ``host_bytes`` after that,
    ``grows_bytes`` more with each poll.
    """

    poison: Mapping[int, FaultKind | Literal["kill"]] = field(default_factory=dict)
    dies_at: dict[int, FaultKind] = field(default_factory=dict)
    killed_at: set[int] = field(default_factory=set)
    """Polls at which the engine's process is killed, and nothing says why."""
    refuses: set[int] = field(default_factory=set)
    over: int = 10**9
    load_over: int = 10**9
    a_poll: int = 10**9
    host_bytes: int = 0
    grows_bytes: int = 0
    first_look: int | None = None
    open_s: float = 0.0
    load_error: Exception | None = None
    stacks: str = ""
    dies_with: EngineDied | None = None
    """At the next poll, whatever else is planned."""
    batched_tokens: int | None = None
    refuses_probes: bool = False

    now: float = 0.0
    """The supervisor's clock: a poll takes a second, opening an engine ``open_s``."""
    polls: int = 0
    opened: list[int] = field(default_factory=list)
    """``max_num_seqs`` of each engine."""
    polls_at_open: list[int] = field(default_factory=list)
    failed_loads: list[int | None] = field(default_factory=list)
    closed_with: list[int] = field(default_factory=list)
    """What was in flight in each engine when it was closed; a dead one has nothing."""
    submitted: list[int] = field(default_factory=list)
    groups: list[set[int]] = field(default_factory=list)
    """What was in flight at each poll."""
    deaths_of: Counter[int] = field(default_factory=Counter)
    """How many deaths each row was in flight at."""
    said: list[str] = field(default_factory=list)
    noted: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        assert len(text.splitlines()) == 1
        self.said.append(text)

    def open(self, job: JobConfig) -> CountingEngine:
        assert len(self.opened) == len(self.closed_with), "two engines would share one GPU"
        size = job.engine.options.get("max_num_seqs")
        if self.load_error is not None:
            self.failed_loads.append(size)
            raise self.load_error
        assert size is not None
        self.now += self.open_s
        limits = {"max_num_seqs": size, "kv_cache_memory_bytes": 1}  # too little to be halved
        if self.batched_tokens is not None:
            limits["max_num_batched_tokens"] = self.batched_tokens
        if size > self.load_over:
            self.failed_loads.append(size)
            raise StartFailed("can't be loaded", AT_LOAD, limits)
        self.opened.append(size)
        self.polls_at_open.append(self.polls)
        return CountingEngine(self, limits)

    def supervise(
        self,
        *,
        max_num_seqs: int | None = 8,
        ladder: Ladder | None = None,
        quarantined: Iterable[int] = (),
        suspicions: Iterable[Suspicion] = (),
        remember: Callable[[EngineHistory], None] = lambda history: None,
        **run: Any,
    ) -> SupervisedEngine:
        options = {} if max_num_seqs is None else {"max_num_seqs": max_num_seqs}
        job = JobConfig(engine={"model": "none", "options": options}, run=run)

        def hear(event: Event) -> None:
            if isinstance(event, EngineHistory):
                remember(event)
            elif isinstance(event, Note):
                self.noted.append(event.text)
            else:
                self.say(event.text)

        return SupervisedEngine(
            job,
            hear,
            ladder=ladder,
            quarantined=quarantined,
            suspicions=suspicions,
            open_engine=self.open,
            clock=lambda: self.now,
            sleep=self.sleep,
        )

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class CountingEngine:
    """A fake: answers ``world.a_poll`` of what it runs, or dies as ``world`` says."""

    versions: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, world: World, limits: Mapping[str, Any]) -> None:
        self.limits = limits
        self.max_num_seqs: int = limits["max_num_seqs"]
        self._world = world
        self._looks: list[int] = [] if world.first_look is None else [world.first_look]
        self._host_bytes = world.host_bytes
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
        world.now += 1
        self._host_bytes += world.grows_bytes
        world.groups.append({request.row.index for request in self._queue})
        running = self._queue[: self.max_num_seqs]
        kinds = [world.poison[r.row.index] for r in running if r.row.index in world.poison]
        if world.polls in world.dies_at:
            kinds.append(world.dies_at[world.polls])
        if len(running) > world.over:
            kinds.append("oom")
        if world.dies_with is not None:
            self._dead = True
            raise world.dies_with
        if world.polls in world.killed_at:
            self._dead = True
            world.deaths_of.update(world.groups[-1])
            raise EngineDied(KILLED)
        if kinds:
            self._dead = True
            world.deaths_of.update(world.groups[-1])
            raise EngineDied(FAULTS.get(kinds[0], KILLED), stacks=world.stacks)
        done = running[: world.a_poll]
        del self._queue[: len(done)]
        return [self._answer(request) for request in done]

    def _answer(self, request: Request) -> Completion:
        is_probe = request.sampling.get("max_tokens") == 1
        if request.row.index in self._world.refuses or (is_probe and self._world.refuses_probes):
            return Completion(request, error=RequestError("refused"))
        return Completion(request, [Choice("tea", "stop")])

    def load(self) -> EngineLoad:
        host_bytes = self._looks.pop() if self._looks else self._host_bytes
        return EngineLoad(min(len(self._queue), self.max_num_seqs), 0, 0.0, 0, host_bytes)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._world.closed_with.append(0 if self._dead else len(self._queue))


def requests(start: int, stop: int) -> list[Request]:
    return [Request(Row(n, f"id-{n}", {}), None, "tea", {}, "") for n in range(start, stop)]


def answer_all(
    engine: SupervisedEngine, rows: Sequence[Request], *, window: int = 10**9, attempts: int = 1
) -> list[Completion]:
    """As the processor does it: fill the window, poll, until every one is back.

    What failed is submitted again, ahead of new rows, until it had its ``attempts``.
    """
    waiting = list(rows)
    due: list[Request] = []
    submitted: list[Request] = []
    done: list[Completion] = []
    for _ in range(200 * len(rows) + 200):
        while (waiting or due) and len(submitted) - len(done) < window:
            submitted.append(due.pop(0) if due else waiting.pop(0))
            engine.submit(submitted[-1])
        if len(done) == len(submitted):
            break
        came_back = engine.poll(0.01)
        done += came_back
        due += [
            replace(c.request, attempt=c.request.attempt + 1)
            for c in came_back
            if c.error is not None and c.request.attempt < attempts
        ]
        engine.load()
    assert engine.poll(0.01) == [], "nothing comes back twice"
    assert sorted(id(c.request) for c in done) == sorted(map(id, submitted)), "each one once"
    assert {c.request.row.index for c in done} == {request.row.index for request in rows}
    return done


def kinds_of(done: Sequence[Completion]) -> dict[int, str]:
    return {c.request.row.index: c.error.kind for c in done if c.error is not None}


class Killed(BaseException):
    """The run is killed, while it opens an engine."""


@dataclass
class MortalWorld(World):
    dies_after: int = 10**9

    def open(self, job: JobConfig) -> CountingEngine:
        if len(self.opened) == self.dies_after:
            raise Killed
        return super().open(job)


def deaths_over_kills(
    poison: dict[int, FaultKind], n: int, *, every: int
) -> tuple[dict[int, str], int]:
    """``n`` rows by a run that is killed after every ``every``-th engine's death, and started again.

    What failed, and how many deaths it took.
    """
    failed: dict[int, str] = {}
    left, learned, deaths = requests(0, n), EngineHistory(), 0
    for _ in range(50):
        world, history = MortalWorld(poison=poison, dies_after=every), [learned]
        engine = world.supervise(suspicions=learned.suspicions, remember=history.append)
        with closing(engine):
            for request in left:
                engine.submit(request)
            try:
                while left:
                    for completion in engine.poll(0.01):
                        left = [request for request in left if request is not completion.request]
                        failed |= kinds_of([completion])
            except Killed:
                pass
        learned = history[-1]
        deaths += engine.restarts
        if not left:
            return failed, deaths
    raise AssertionError(f"50 starts, and {len(left)} rows left")


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("poison", [{13: "engine_crash"}, {0: "oom", 63: "oom", 40: "stall"}])
def test_a_search_that_is_killed_again_and_again_goes_on_where_it_was(
    poison: dict[int, FaultKind], every: int
) -> None:
    at_once = deaths_over_kills(poison, 64, every=10**9)
    failed, deaths = deaths_over_kills(poison, 64, every=every)
    assert failed == at_once[0] == known_kinds(World(poison=poison))
    assert deaths <= at_once[1] + len(poison)


def test_rows_that_have_changed_since_are_not_suspected() -> None:
    known = [Suspicion({0: "old", 1: ""}), Suspicion({2: ""}, ("engine_crash RuntimeError",))]
    world = World()
    with closing(world.supervise(suspicions=known)) as engine:
        answer_all(engine, requests(0, 6))
    assert world.groups[:3] == [{0}, {1}, {2}], "row 0 came first; the others wait for its end"
    assert world.groups[3] == {3, 4, 5}


def test_a_search_that_has_ended_leaves_nothing_to_remember() -> None:
    history: list[EngineHistory] = []
    world = World(poison={5: "engine_crash"})
    with closing(world.supervise(remember=history.append)) as engine:
        answer_all(engine, requests(0, 8))
        assert {len(told.suspicions) for told in history[:-1]} > {0} or history[0].suspicions
        assert history[-1].suspicions == ()


def test_a_row_that_was_quarantined_before_a_kill_is_not_searched_for_again() -> None:
    world = World(poison={2: "oom"})
    with closing(
        world.supervise(suspicions=[Suspicion({2: ""}, (), is_quarantined=True)])
    ) as engine:
        assert kinds_of(answer_all(engine, requests(0, 8))) == {2: "oom"}
        assert engine.restarts == 1


def test_an_engine_that_dies_of_every_row_proves_nothing_for_the_next_start() -> None:
    history: list[EngineHistory] = []
    world = World(poison=dict.fromkeys(range(20), "engine_crash"))
    with (
        closing(world.supervise(remember=history.append, max_engine_restarts=5)) as engine,
        pytest.raises(EngineError, match="without one answer"),
    ):
        answer_all(engine, requests(0, 20), window=1)
    assert history[-1].suspicions
    assert not any(suspicion.deaths for suspicion in history[-1].suspicions)


KINDS: st.SearchStrategy[FaultKind] = st.sampled_from(["oom", "engine_crash", "stall"])


@given(st.dictionaries(st.integers(0, 39), KINDS, max_size=4), st.integers(1, 5))
def test_poison_rows_alone_fail_however_often_the_run_is_killed(
    poison: dict[int, FaultKind], every: int
) -> None:
    assert deaths_over_kills(poison, 40, every=every)[0] == known_kinds(World(poison=poison))


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
    failed = kinds_of(done)
    assert failed.keys() >= known_kinds(world).keys()
    innocent = failed.keys() - known_kinds(world).keys()
    assert all(world.deaths_of[index] > PROOF for index in innocent)
    assert len(world.opened) == len(world.closed_with)


def test_that_accidents_happen_is_remembered_for_the_next_start() -> None:
    history: list[EngineHistory] = []
    world = World(dies_at={2: "engine_crash", 9: "engine_crash"})
    with closing(world.supervise(remember=history.append)) as engine:
        answer_all(engine, requests(0, 40), window=4)
    assert [lesson.among_accidents for lesson in history] == [False, True, True, True], (
        "before each engine, and at the end of each search"
    )


@given(st.dictionaries(st.integers(1, 60), KINDS, max_size=PROOF), SIZES, WINDOWS)
def test_deaths_that_do_not_repeat_cost_no_row(
    deaths: dict[int, FaultKind], size: int, window: int
) -> None:
    world = World(dies_at=deaths, a_poll=2)
    with closing(world.supervise(max_num_seqs=size)) as engine:
        assert kinds_of(answer_all(engine, requests(0, 40), window=window)) == {}


@given(WORLDS, SIZES, WINDOWS, st.integers(2, 3))
def test_a_quarantined_row_that_comes_again_runs_alone_and_costs_one_death(
    world: World, size: int, window: int, attempts: int
) -> None:
    world.refuses.clear()
    with closing(world.supervise(max_num_seqs=size, max_engine_restarts=1000)) as engine:
        done = answer_all(engine, requests(0, 40), window=window, attempts=attempts)
    assert kinds_of(done) == known_kinds(world)
    assert Counter(c.request.row.index for c in done) == Counter(range(40)) + Counter(
        dict.fromkeys(world.poison, attempts - 1)
    )
    for index in world.poison:
        last = [group for group in world.groups if index in group][-attempts:]
        assert last == [{index}] * attempts, "each further try alone, and one death for each"


def quarantined(world: World, engine: SupervisedEngine) -> Request:
    """Rows 0 to 7 are through; the one that was found to be poison, to be submitted again."""
    (failed,) = [c.request for c in answer_all(engine, requests(0, 8)) if c.error is not None]
    assert failed.row.index in world.poison
    return replace(failed, attempt=2)


def test_a_quarantined_row_may_be_answered_when_it_comes_again() -> None:
    world = World(poison={2: "oom"})
    with closing(world.supervise()) as engine:
        again = quarantined(world, engine)
        deaths = engine.restarts
        world.poison.clear()  # its images are smaller now
        assert kinds_of(answer_all(engine, [again, *requests(8, 12)])) == {}
        assert engine.restarts == deaths
    assert [group for group in world.groups if group][-2:] == [{2}, {8, 9, 10, 11}]


def test_a_quarantined_row_that_comes_while_others_run_waits_until_they_are_through() -> None:
    world = World(poison={2: "engine_crash"})
    with closing(world.supervise()) as engine:
        again = quarantined(world, engine)
        tried, deaths = len(world.groups), engine.restarts
        world.a_poll = 1
        for request in requests(8, 11):
            engine.submit(request)
        done = list(engine.poll(0.01))
        for request in [again, *requests(11, 13)]:
            engine.submit(request)
        while len(done) < 6:
            done += engine.poll(0.01)
        assert kinds_of(done) == {2: "engine_crash"}
        assert engine.restarts == deaths + 1
    assert world.groups[tried:] == [
        {8, 9, 10}, {9, 10}, {10},
        {2},
        {11, 12}, {12},
    ]  # fmt: skip


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
    assert (
        "out of memory (OutOfMemoryError: planted): next engine with max_num_seqs = 2" in world.said
    )


def test_a_crash_does_not_make_the_batch_smaller() -> None:
    world = World(dies_at={1: "engine_crash", 2: "stall"})
    with closing(world.supervise()) as engine:
        answer_all(engine, requests(0, 8))
        assert engine.ladder.steps == []
    assert world.opened == [8, 8, 8]


def test_a_kill_without_a_sign_of_memory_does_not_make_the_batch_smaller() -> None:
    world = World(killed_at={1}, a_poll=1)
    with closing(world.supervise()) as engine:
        assert kinds_of(answer_all(engine, requests(0, 40))) == {}
        assert engine.ladder.steps == []
    assert world.opened == [8, 8]
    told = (
        "engine died (engine_crash) with 40 rows in flight: SIGKILL: killed from outside, no sign"
    )
    assert world.said == [f"{told} of memory running out"]


def test_a_second_kill_in_a_row_is_taken_for_memory() -> None:
    world = World(killed_at={1, 20}, a_poll=1)
    with closing(world.supervise()) as engine:
        assert kinds_of(answer_all(engine, requests(0, 40))) == {}
        assert engine.ladder.steps == [{"max_num_seqs": 4}]


@pytest.mark.parametrize("between", ["a stretch of success", "another death"])
def test_kills_that_are_far_apart_are_no_sign_of_memory(between: str) -> None:
    rows = requests(0, 1200 if between == "a stretch of success" else 40)
    far = 1100 if between == "a stretch of success" else 20
    world = World(killed_at={1, far}, a_poll=1)
    if between == "another death":
        world.dies_at = {10: "engine_crash"}
    with closing(world.supervise()) as engine:
        assert kinds_of(answer_all(engine, rows)) == {}
        assert engine.ladder.steps == []


def test_a_row_that_has_its_engine_killed_is_found_and_costs_no_step() -> None:
    world = World(poison={3: "kill"})
    with closing(world.supervise()) as engine:
        assert kinds_of(answer_all(engine, requests(0, 8))) == {3: "oom"}
        assert engine.ladder.steps == []
        assert engine.restarts <= 3 + PROOF


def test_an_engine_that_is_killed_at_load_is_tried_once_more_as_it_was() -> None:
    world = World()
    open_one = world.open

    def killed_at_first(job: JobConfig) -> CountingEngine:
        if not world.failed_loads:
            world.failed_loads.append(job.engine.options["max_num_seqs"])
            raise StartFailed("its process died", KILLED, {})
        return open_one(job)

    world.open = killed_at_first  # type: ignore[method-assign]
    with closing(world.supervise()) as engine:
        assert engine.ladder.steps == []
    assert (world.failed_loads, world.opened) == ([8], [8])


def test_an_engine_that_is_killed_at_every_load_is_made_smaller() -> None:
    world = World(load_error=StartFailed("its process died", KILLED, {}))
    with pytest.raises(StartFailed):
        world.supervise()
    assert world.failed_loads == [8, 8, 4, 2, 1]


@pytest.mark.parametrize("remembered", [[], [{"max_num_seqs": 6}]])
def test_steps_that_a_poison_row_cost_are_taken_back(remembered: list[dict[str, Any]]) -> None:
    world = World(poison={3: "oom"})
    with closing(world.supervise(ladder=Ladder(list(remembered)))) as engine:
        assert kinds_of(answer_all(engine, requests(0, 8))) == {3: "oom"}
        assert engine.ladder.steps == remembered
    assert min(world.opened) < world.opened[0] == world.opened[-1]


def test_steps_of_an_earlier_search_stay_when_a_poison_row_costs_more() -> None:
    world = World(over=4, poison={30: "oom"})
    with closing(world.supervise(max_num_seqs=16)) as engine:
        assert kinds_of(answer_all(engine, requests(0, 40), window=8)) == {30: "oom"}
        assert engine.ladder.steps == [{"max_num_seqs": 8}, {"max_num_seqs": 4}]


def test_a_step_that_no_poison_row_cost_stays() -> None:
    world = World(over=7, poison={3: "engine_crash"})
    with closing(world.supervise(max_num_seqs=16)) as engine:
        assert kinds_of(answer_all(engine, requests(0, 16))) == {3: "engine_crash"}
        assert engine.ladder.steps == [{"max_num_seqs": 8}]
    assert (
        world.said.count(
            "out of memory (OutOfMemoryError: planted): next engine with max_num_seqs = 8"
        )
        == 1
    )


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


@pytest.mark.parametrize("open_s", [0.5, 10])
def test_the_engine_grows_only_when_the_restart_is_a_small_share_of_its_life(open_s: float) -> None:
    world = World(open_s=open_s, a_poll=1)
    with closing(world.supervise(ladder=Ladder([{"max_num_seqs": 4}], stretch=3))) as engine:
        answer_all(engine, requests(0, 250), window=1)
    assert world.opened == [4, 8]
    assert world.polls_at_open == [0, open_s / GROWTH_SHARE]


def test_growth_that_proves_too_much_is_tried_half_as_often() -> None:
    world = World(load_over=4)
    with closing(world.supervise(ladder=Ladder([{"max_num_seqs": 4}], stretch=4))) as engine:
        answer_all(engine, requests(0, 30), window=1)
        assert engine.ladder.steps == [{"max_num_seqs": 4}]
    assert len(world.failed_loads) == 3, "after 4, 8 and 16 answers"
    assert world.opened == [4] * 4


def test_an_engine_that_grew_too_large_is_replaced_between_rows() -> None:
    world = World(host_bytes=GIB, grows_bytes=GIB // 4, a_poll=1)
    with closing(world.supervise(max_host_gb=1.5)) as engine:
        answer_all(engine, requests(0, 30), window=4)
        assert engine.restarts >= 3
    assert set(world.closed_with) == {0}
    assert world.submitted == list(range(30))
    restart = "engine restart: its process holds 1.8 GiB (run.max_host_gb = 1.5)"
    assert world.said.count(restart) == len(world.opened) - 1
    assert world.opened[:3] == [8, 8, 4], "the second time so soon, the batch is made smaller"


def test_no_restart_helps_where_a_new_engine_is_too_large_and_that_is_said_once() -> None:
    world = World(host_bytes=2 * GIB, grows_bytes=GIB // 4, a_poll=1)
    with closing(world.supervise(max_host_gb=1.5)) as engine:
        answer_all(engine, requests(0, 12), window=4)
        assert engine.restarts == 0
    assert world.said == [
        "a new engine already holds 2.2 GiB (run.max_host_gb = 1.5): no restart would help"
    ]


def test_an_engine_whose_size_is_not_known_at_the_first_look_is_not_restarted_for_ever() -> None:
    """A ProcessEngine's load is 0 bytes until its process has told of a first turn."""
    world = World(host_bytes=2 * GIB, first_look=0, a_poll=1)
    with closing(world.supervise(max_host_gb=1.5)) as engine:
        answer_all(engine, requests(0, 12), window=4)
        assert engine.restarts == 0
    assert len(world.said) == 1


def test_what_one_engine_began_with_says_nothing_about_the_next() -> None:
    world = World(host_bytes=2 * GIB, a_poll=1)
    with closing(world.supervise(max_host_gb=1.5)) as engine:
        answer_all(engine, requests(0, 4), window=1)
        assert engine.restarts == 0
        world.host_bytes, world.grows_bytes = GIB, GIB // 4
        world.dies_at = {world.polls + 1: "engine_crash"}
        answer_all(engine, requests(4, 12), window=1)
        assert engine.restarts > 1
    assert world.said[-1] == "engine restart: its process holds 1.8 GiB (run.max_host_gb = 1.5)"


@pytest.mark.parametrize("max_host_gb", [None, 2.5])
def test_an_engine_within_its_memory_is_left_alone(max_host_gb: float | None) -> None:
    world = World(host_bytes=2 * GIB)
    with closing(world.supervise(max_host_gb=max_host_gb)) as engine:
        answer_all(engine, requests(0, 12))
        assert engine.restarts == 0
    assert world.said == []


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


@pytest.mark.parametrize("kind", ["engine_crash", "oom"])
@pytest.mark.parametrize("where", [0.0, 0.3, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("n_poison", [12, 16, 40])
def test_many_poison_rows_side_by_side_do_not_end_a_run_that_has_sound_rows(
    n_poison: int, where: float, kind: FaultKind
) -> None:
    first = int(where * (384 - n_poison))
    world = World(poison=dict.fromkeys(range(first, first + n_poison), kind))
    with closing(world.supervise(max_num_seqs=256)) as engine:
        done = answer_all(engine, requests(0, 768), window=384)
    assert kinds_of(done) == known_kinds(world)


@pytest.mark.parametrize("kind", ["engine_crash", "oom"])
@pytest.mark.parametrize("first", [0, 172, 376])
def test_some_poison_rows_side_by_side_do_not_end_a_run_without_rows_behind_them(
    first: int, kind: FaultKind
) -> None:
    world = World(poison=dict.fromkeys(range(first, first + 8), kind))
    with closing(world.supervise(max_num_seqs=256)) as engine:
        assert kinds_of(answer_all(engine, requests(0, 384))) == known_kinds(world)


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
    with pytest.raises(StartFailed, match=r"^can't be loaded$"):
        world.supervise()
    assert world.failed_loads == [8, 4, 2, 1]


@pytest.mark.parametrize(("asked", "tried"), [(None, [None, 128, 64]), (24, [24, 12, 6])])
def test_an_engine_that_dies_at_load_before_it_told_its_limits_is_halved_all_the_same(
    asked: int | None, tried: list[int | None]
) -> None:
    """As when the kernel kills its process: 256 is what vLLM takes where the job says nothing."""
    world = World(load_error=StartFailed("it died while it loaded", AT_LOAD, {}))
    with pytest.raises(StartFailed) as raised:
        world.supervise(max_num_seqs=asked)
    assert raised.value is world.load_error
    assert world.failed_loads[:3] == tried
    assert world.failed_loads[-1] == 1


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


@pytest.mark.parametrize(("rows", "poison"), [(384, 16), (384, 96), (60, 20)])
@pytest.mark.parametrize("kind", ["engine_crash", "oom"])
def test_poison_rows_that_are_spread_do_not_end_a_run_without_rows_behind_them(
    rows: int, poison: int, kind: FaultKind
) -> None:
    step = rows // poison
    world = World(poison=dict.fromkeys(range(step // 2, rows, step), kind))
    with closing(world.supervise(max_num_seqs=256)) as engine:
        assert kinds_of(answer_all(engine, requests(0, rows))) == known_kinds(world)


def test_a_probe_that_is_refused_proves_nothing_and_is_not_tried_for_ever() -> None:
    world = World(poison=dict.fromkeys(range(20, 36), "engine_crash"), refuses_probes=True)
    with closing(world.supervise()) as engine:
        done = answer_all(engine, requests(0, 20))
        done += answer_all(engine, [*requests(20, 36), *requests(36, 40)])
    assert kinds_of(done) == dict.fromkeys(range(20, 36), "engine_crash")


def test_a_row_that_is_proven_by_the_last_death_allowed_is_not_lost() -> None:
    world = World(poison={0: "engine_crash"})
    with closing(world.supervise(max_engine_restarts=2)) as engine:
        assert kinds_of(answer_all(engine, requests(0, 1))) == {0: "engine_crash"}


def test_rows_that_were_quarantined_before_are_run_alone_and_once_however_many() -> None:
    world = World(poison=dict.fromkeys(range(40), "engine_crash"))
    with closing(world.supervise(quarantined=range(40))) as engine:
        assert kinds_of(answer_all(engine, requests(0, 40))) == known_kinds(world)
        assert engine.restarts == 40


def test_the_row_that_the_engine_names_itself_fails_and_the_others_go_on_in_order() -> None:
    world = World()
    rows = requests(0, 6)
    with closing(world.supervise()) as engine:
        for request in rows:
            engine.submit(request)
        fault = Fault("timeout", "preparing its prompt", "no end for 9 s")
        death = EngineDied(fault, request=rows[2])
        world.dies_with = death
        [failed] = engine.poll(0.01)
        world.dies_with = None
        assert failed.request is rows[2]
        assert failed.error is not None
        assert failed.error.kind == "timeout"
        assert [c.request for c in engine.poll(0.01)] == [*rows[:2], *rows[3:]]


def test_a_row_alone_that_runs_out_of_memory_gets_fewer_tokens_at_a_time() -> None:
    world = World(dies_at={1: "oom"}, batched_tokens=4096)
    with closing(world.supervise()) as engine:
        assert kinds_of(answer_all(engine, requests(0, 1))) == {}
        assert engine.ladder.steps == [{"max_num_batched_tokens": 2048}]


def test_steps_that_never_helped_are_not_remembered() -> None:
    world = World(dies_at=dict.fromkeys(range(1, 40), "oom"))
    kept: list[Any] = []
    engine = world.supervise(
        max_engine_restarts=3, remember=lambda history: kept.append(list(history.steps))
    )
    with closing(engine), pytest.raises(EngineError):
        answer_all(engine, requests(0, 40))
    assert kept[0] == [{"max_num_seqs": 4}], "at once, lest the kernel end the run as well"
    assert kept[-1] == []


def test_the_engines_own_limits_are_passed_on() -> None:
    world = World()
    with closing(world.supervise()) as engine:
        assert engine.limits == {"max_num_seqs": 8, "kv_cache_memory_bytes": 1}
        assert (engine.max_num_seqs, engine.versions) == (8, {})


def test_the_stacks_of_a_stalled_engine_are_noted_and_not_said() -> None:
    stacks = "Thread 1 (idle)\n    poll (engine.py:1)\n"
    world = World(dies_at={1: "stall"}, stacks=stacks)
    with closing(world.supervise()) as engine:
        answer_all(engine, requests(0, 8))
    assert world.noted == [stacks]
    assert world.said == ["engine died (stall) with 8 rows in flight: stall: planted"]


def test_a_death_without_stacks_leaves_no_note() -> None:
    world = World(dies_at={1: "engine_crash"})
    with closing(world.supervise()) as engine:
        answer_all(engine, requests(0, 8))
    assert world.noted == []


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


def test_it_may_be_closed_twice() -> None:
    world = World()
    engine = world.supervise()
    engine.close()
    engine.close()
    assert world.closed_with == [0]
