"""Fake engines that die as a test plans it, and the world that counts them."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hypothesis import strategies as st
from msgspec.structs import replace

from batchkit.config.tables import JobConfig
from batchkit.engines.base import EngineLoad
from batchkit.engines.faults import EngineDied, Fault, FaultKind, StartFailed, fault_of_exit
from batchkit.engines.memory_ladder import Ladder
from batchkit.errors import RequestError
from batchkit.execution.events import EngineHistory, Event, Hear, Note
from batchkit.execution.restart_thread import SearchTurn
from batchkit.execution.supervisor import SupervisedEngine
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
    load_error: Exception | None = None
    stacks: str = ""
    dies_with: EngineDied | None = None
    """At the next poll, whatever else is planned."""
    batched_tokens: int | None = None
    refuses_probes: bool = False
    kills_probes: int = 0
    """The engine dies while so many of them run."""

    polls: int = 0
    opened: list[int] = field(default_factory=list)
    """``max_num_seqs`` of each engine."""
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

    def open(self, job: JobConfig, hear: Hear) -> CountingEngine:
        assert len(self.opened) == len(self.closed_with), "two engines would share one GPU"
        size = job.engine.options.get("max_num_seqs")
        if self.load_error is not None:
            self.failed_loads.append(size)
            raise self.load_error
        assert size is not None
        limits = {"max_num_seqs": size, "kv_cache_memory_bytes": 1}  # too little to be halved
        if self.batched_tokens is not None:
            limits["max_num_batched_tokens"] = self.batched_tokens
        if size > self.load_over:
            self.failed_loads.append(size)
            raise StartFailed("can't be loaded", AT_LOAD, limits)
        self.opened.append(size)
        return CountingEngine(self, limits)

    def supervise(
        self,
        *,
        max_num_seqs: int | None = 8,
        ladder: Ladder | None = None,
        quarantined: Iterable[int] = (),
        remember: Callable[[EngineHistory], None] = lambda history: None,
        beside: SearchTurn | None = None,
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
            self.open,
            ladder=ladder,
            quarantined=quarantined,
            beside=beside,
            sleep=lambda seconds: None,
        )


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
        self._host_bytes += world.grows_bytes
        world.groups.append({request.row.index for request in self._queue})
        running = self._queue[: self.max_num_seqs]
        kinds = [world.poison[r.row.index] for r in running if r.row.index in world.poison]
        if world.polls in world.dies_at:
            kinds.append(world.dies_at[world.polls])
        if len(running) > world.over:
            kinds.append("oom")
        if world.kills_probes and any(map(_is_probe, running)):
            world.kills_probes -= 1
            kinds.append("engine_crash")
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
        refused = self._world.refuses_probes and _is_probe(request)
        if request.row.index in self._world.refuses or refused:
            return Completion(request, error=RequestError("refused"))
        return Completion(request, [Choice("tea", "stop")])

    def load(self) -> EngineLoad:
        host_bytes = self._looks.pop() if self._looks else self._host_bytes
        return EngineLoad(min(len(self._queue), self.max_num_seqs), 0, 0.0, 0, host_bytes)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._world.closed_with.append(0 if self._dead else len(self._queue))


def _is_probe(request: Request) -> bool:
    return request.sampling.get("max_tokens") == 1


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


def known_kinds(world: World) -> dict[int, str]:
    """A row that stalls the engine kills it as much as one that crashes it."""
    return dict.fromkeys(world.refuses, "invalid_request") | {
        index: "oom" if kind == "oom" else "engine_crash" for index, kind in world.poison.items()
    }


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
