"""One engine of a worker: opened, or kept by the run before; supervised, and fed with its requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from batchkit.config.tables import JobConfig
from batchkit.engines.base import Engine, EngineLoad
from batchkit.engines.faults import EngineDied
from batchkit.engines.memory_ladder import Ladder
from batchkit.engines.process.launcher import Launcher, log_of
from batchkit.engines.registry import open_engine
from batchkit.errors import EngineError
from batchkit.execution.attempts import Attempts
from batchkit.execution.events import EngineHistory, EngineLine, Event, Found, Hear, Line, Load
from batchkit.execution.requests import Requests
from batchkit.execution.settle import resolved
from batchkit.execution.start import Start
from batchkit.execution.supervisor import SupervisedEngine
from batchkit.execution.window import Window
from batchkit.rendering.prefetch import AHEAD
from batchkit.rendering.templates.prompt import constant_files
from batchkit.rendering.tools import ignored_tools
from batchkit.storage import identity
from batchkit.types import Completion, Key, Request

POLL_S = 0.05


class Loaded(NamedTuple):
    """An engine, and what it was loaded with: its options, the ladder's ``steps`` among them, and
    what the run's identity says of the engine's files and of ``commits`` on the hub."""

    engine: Engine
    options: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    identity: Mapping[str, Any]
    commits: Mapping[str, str]


class Wanted(NamedTuple):
    """The engine that a lane needs: one that was loaded with these ``options`` from these files. Its process
    has the variables of ``environment`` besides the run's own."""

    name: str
    options: Mapping[str, Any]
    identity: Mapping[str, Any]
    environment: Mapping[str, str] = MappingProxyType({})

    def is_met_by(self, loaded: Loaded) -> bool:
        return (loaded.options, loaded.identity) == (self.options, self.identity)


class KeptEngine:
    """The engines that are loaded and that no run uses now: ``idle``, by their names.

    A run takes an engine, and puts it back when it ends, if nothing is in flight then. One run at a time; a
    processor's outlives its runs.

    ``log`` is what ``[engine]`` prints to: outside the run's folder if the engine outlives the run,
    since that folder may be moved aside.
    """

    def __init__(self, log: Path) -> None:
        self.idle: dict[str, Loaded] = {}
        self._log = log
        self._launchers: dict[str, Launcher] = {}

    def launcher(self, wanted: Wanted) -> Launcher:
        """What starts the processes of that engine."""
        known = self._launchers.get(wanted.name)
        if known is None or known.environment != wanted.environment:
            if known is not None:
                known.close()
            known = Launcher(log_of(self._log, wanted.name), wanted.environment)
            self._launchers[wanted.name] = known
        return known

    def get(self, wanted: Wanted, load: Callable[[Launcher], Loaded]) -> Loaded:
        """The engine that waits, if it lives and is the one ``wanted``; else it is closed, and another loaded."""
        idle = self.idle.pop(wanted.name, None)
        if idle is not None:
            if wanted.is_met_by(idle) and _lives(idle.engine):
                return idle
            idle.engine.close()
        return load(self.launcher(wanted))

    def put(self, name: str, loaded: Loaded, *, is_idle: bool) -> None:
        """The run has ended."""
        if is_idle:
            self.idle[name] = loaded
        else:
            loaded.engine.close()

    def close(self) -> None:
        """Release what it holds. It may be used again."""
        for loaded in self.idle.values():
            loaded.engine.close()
        for launcher in self._launchers.values():
            launcher.close()
        self.idle, self._launchers = {}, {}


class Engines(Protocol):
    """Where a lane gets its engine from: ``KeptEngine``, or ``SharedEngines``."""

    @property
    def idle(self) -> Mapping[str, Loaded]: ...

    def get(self, wanted: Wanted, load: Callable[[Launcher], Loaded]) -> Loaded: ...

    def put(self, name: str, loaded: Loaded, *, is_idle: bool) -> None: ...


class Opening(NamedTuple):
    """How a worker opens its engines. ``hear`` gets what happens to them; ``known``, by name, is what
    earlier starts learned. An engine that waits in ``engines`` is taken from there, and waits there
    again afterwards. ``guard`` is entered each time a model is loaded. ``environments``: variables of
    the engines' processes, by name, besides the run's own."""

    hear: Hear
    engines: Engines
    known: Mapping[str, EngineHistory] = MappingProxyType({})
    guard: Callable[[], AbstractContextManager[None]] = nullcontext
    environments: Mapping[str, Mapping[str, str]] = MappingProxyType({})


class Lane:
    """The engine ``name``, "" for ``[engine]``, whose model is loaded in the constructor, and the
    requests for it: each comes back once, as the completion that settled it. Used by one thread.

    ``in_flight`` holds the requests that the engine works on.

    Raises:
        JobError, EngineError: the model can't be loaded.
    """

    def __init__(self, start: Start, name: str, requests: Requests, opening: Opening) -> None:
        self.name = name
        self.in_flight: dict[Key, Request] = {}
        self._start, self._requests, self._opening = start, requests, opening
        self._job = start.job.with_engine(name)
        self._hear = _named(opening.hear, name) if name else opening.hear
        self._attempts = Attempts(start)
        self._warned = False
        self._loaded: Loaded
        self._seen = EngineLoad(0, 0, 0.0, 0)
        self._engine = self._supervised()
        fixed = start.job.run.max_in_flight
        self._window = Window(self._engine.max_num_seqs, fixed=None if fixed == "auto" else fixed)
        self._preemptions = 0

    def fill(self) -> list[Completion]:
        """Submit requests while there is room; wait only if the engine has nothing to do.

        Returns rows that ended without the engine. Bounded, so that many of them reach the disk along
        the way.
        """
        settled: list[Completion] = []
        for _ in range(AHEAD):
            if len(self.in_flight) >= self._window.size:
                break
            if settled and self._requests.broken:
                break  # the error is raised once these are written
            rendered = self._next()
            if rendered is None:
                break
            if isinstance(rendered, Completion):
                settled += self._settled(rendered)
            else:
                self._engine.submit(rendered)
                self.in_flight[rendered.key] = rendered
        return settled

    def poll(self, timeout_s: float) -> list[Completion]:
        """What it has finished, after a wait of at most ``timeout_s`` for the first; then adapts the
        window to its load."""
        settled: list[Completion] = []
        if self.in_flight:
            for completion in self._engine.poll(timeout_s):
                del self.in_flight[completion.request.key]
                settled += self._settled(completion)
        elif self._attempts:
            time.sleep(timeout_s)  # all remaining rows wait for their next attempt
        self._adapt()
        return settled

    @property
    def is_done(self) -> bool:
        """True once every request has come back."""
        return not self.in_flight and not self._attempts and self._requests.exhausted

    @property
    def load(self) -> Load:
        seen = self._seen
        return Load(
            self._window.size,
            len(self.in_flight),
            seen.running,
            seen.waiting,
            seen.kv_cache_usage,
            self._preemptions,
            seen.unfinished_tokens,
            self._attempts.retried,
            seen.trouble,
        )

    @property
    def max_num_seqs(self) -> int:
        return self._engine.max_num_seqs

    @property
    def versions(self) -> Mapping[str, str]:
        return self._engine.versions

    def close(self) -> None:
        """Drop what is in flight. An idle engine waits for the next run."""
        self._opening.engines.put(self.name, self._loaded, is_idle=self._engine.is_idle)

    def _next(self) -> Request | Completion | None:
        """What to submit next, or a row that ended without the engine; None if neither is ready."""
        if (again := self._attempts.pop_due()) is not None:
            return again
        if self.in_flight and self._requests.broken:
            return None  # what is in flight is paid for: settle it before the error is raised
        return self._requests.get(self.name, 0 if self.in_flight else POLL_S)

    def _settled(self, completion: Completion) -> list[Completion]:
        """The completion that settles its request; nothing if it is tried again."""
        if completion.generations is not None:  # the outcome of a row, whose requests were settled
            return [completion]
        if not self._warned and (warning := ignored_tools(completion.request, completion.prompt)):
            self._warned = True
            self._hear(EngineLine(warning))
        settled = self._attempts.settle(resolved(self._start, completion))
        if settled is None:
            return []
        self._requests.release(settled.request)
        return [settled]

    def _adapt(self) -> None:
        load = self._look(self._engine)
        self._preemptions += load.preempted
        if change := self._window.adapt(load, len(self.in_flight), self._engine.max_num_seqs):
            self._hear(Line(change))

    def _look(self, engine: Engine) -> EngineLoad:
        load = engine.load()
        if load.served != self._seen.served:
            self._hear(Found({"engine.served": load.served}))
        self._seen = load
        return load

    def _supervised(self) -> SupervisedEngine:
        idle = self._opening.engines.idle.get(self.name)
        known = self._opening.known.get(self.name, EngineHistory()) if idle is None else idle
        ladder = Ladder(known.steps)
        if ladder.steps:
            self._hear(Line(f"engine settings remembered: {dict(ladder.overrides)}"))
        engine = SupervisedEngine(
            self._job,
            self._hear,
            lambda job: self._opened(job, ladder),
            ladder=ladder,
            quarantined=self._start.options.quarantined,
        )
        with ExitStack() as held:
            held.enter_context(closing(engine))
            self._look(engine)  # it says which model a server serves, before it gets a row
            held.pop_all()
        return engine

    def _opened(self, job: JobConfig, ladder: Ladder) -> Engine:
        """An engine for ``job``, whose options are those of the ladder."""
        opening, options, then = self._opening, job.engine.options, self._start.identity

        def load(launcher: Launcher) -> Loaded:
            engine = open_engine(job, launcher)
            return Loaded(engine, options, ladder.steps, then, identity.hub_commits(self._job))

        wanted = Wanted(self.name, options, then, opening.environments.get(self.name, {}))
        with opening.guard(), ExitStack() as held:
            loaded = opening.engines.get(wanted, load)
            held.enter_context(closing(loaded.engine))
            check_unchanged(self._start)
            if loaded.commits:
                self._hear(Found({"engine.commits": loaded.commits}))
            held.pop_all()
        self._loaded = loaded
        return loaded.engine


def _named(hear: Hear, name: str) -> Hear:
    """``hear`` for one of ``[engines]``: what it gets says which."""

    def hear_of_it(event: Event) -> None:
        match event:
            case Line(text) | EngineLine(text):
                event = event._replace(text=f"engine {name}: {text}")
            case EngineHistory():
                event = event._replace(engine=name)
            case Found(found):
                event = Found(
                    {f"engines.{name}.{k.removeprefix('engine.')}": found[k] for k in found}
                )
        hear(event)

    return hear_of_it


def check_unchanged(start: Start) -> None:
    """Check that the files that engines, functions and prompts were loaded from are those that the start
    began with. A worker on another machine may not see all of them: those that it sees are compared.

    Raises:
        EngineError: they are other files.
    """
    then = start.identity
    now = identity.engine_identity(start.job) | identity.of_function(start.job)
    if "prompt.files" in then:
        now["prompt.files"] = constant_files(start.job)
    if changes := identity.differences(_only(then, now), _only(now, then)):
        raise EngineError(
            "found other files than those that the run began with, and a run's answers are all"
            f" of one model and prompt: {'; '.join(changes)}. Every finished row is on disk: bring"
            " the old files back and run the same command again, or begin a new run (--fresh)"
        )


def _only(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in one.items() if key in other}


def _lives(engine: Engine) -> bool:
    try:
        engine.poll(0)
    except (EngineDied, EngineError):
        return False
    return True
