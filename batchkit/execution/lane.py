"""A lane: one engine of a worker, which is loaded or reused, supervised, and gets requests."""

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

POLL_S = 0.05  # longest wait of one poll, so that the loop soon notices signals and due retries


class Loaded(NamedTuple):
    """A loaded engine, with the settings and files from which it was loaded.

    - ``options``: the engine's options, with all reductions.
    - ``reductions``: options that were reduced after out-of-memory errors.
    - ``identity``: hashes of the engine's files.
    - ``commits``: commit hashes of models from the hub.
    """

    engine: Engine
    options: Mapping[str, Any]
    reductions: Sequence[Mapping[str, Any]]
    identity: Mapping[str, Any]
    commits: Mapping[str, str]


class Wanted(NamedTuple):
    """A description of the engine that a lane needs.

    - ``options``, ``identity``: the options and file hashes with which the engine must be loaded.
    - ``environment``: variables that its process gets in addition to the run's own.
    """

    name: str
    options: Mapping[str, Any]
    identity: Mapping[str, Any]
    environment: Mapping[str, str] = MappingProxyType({})

    def is_met_by(self, loaded: Loaded) -> bool:
        return (loaded.options, loaded.identity) == (self.options, self.identity)


class KeptEngine:
    """Loaded engines that outlive a run, so that the next run does not load them again. It serves one run at a time.

    A run takes an engine, and returns it at its end if no request is in flight.

    - ``idle``: engines that no run uses now, by name.
    - ``log``: file to which ``[engine]`` prints. It should be outside the run folder, which may be moved aside while
      the engine lives on.
    """

    def __init__(self, log: Path) -> None:
        self.idle: dict[str, Loaded] = {}
        self._log = log
        self._launchers: dict[str, Launcher] = {}

    def launcher(self, wanted: Wanted) -> Launcher:
        """Return the launcher for the processes of the engine ``wanted``."""
        known = self._launchers.get(wanted.name)
        if known is None or known.environment != wanted.environment:
            if known is not None:
                known.close()
            known = Launcher(log_of(self._log, wanted.name), wanted.environment)
            self._launchers[wanted.name] = known
        return known

    def get(self, wanted: Wanted, load: Callable[[Launcher], Loaded]) -> Loaded:
        """Return the idle engine if it is alive and matches ``wanted``. Otherwise close it and call ``load``."""
        idle = self.idle.pop(wanted.name, None)
        if idle is not None:
            if wanted.is_met_by(idle) and _answers_poll(idle.engine):
                return idle
            idle.engine.close()
        return load(self.launcher(wanted))

    def put(self, name: str, loaded: Loaded, *, is_idle: bool) -> None:
        """Take an engine back at the end of a run. Close the engine unless ``is_idle``, because requests may be in
        flight."""
        if is_idle:
            self.idle[name] = loaded
        else:
            loaded.engine.close()

    def close(self) -> None:
        """Close all idle engines and launchers. The object may be used again."""
        for loaded in self.idle.values():
            loaded.engine.close()
        for launcher in self._launchers.values():
            launcher.close()
        self.idle, self._launchers = {}, {}


class Engines(Protocol):
    """A provider of loaded engines for lanes: ``KeptEngine`` or ``SharedEngines``."""

    @property
    def idle(self) -> Mapping[str, Loaded]: ...

    def get(self, wanted: Wanted, load: Callable[[Launcher], Loaded]) -> Loaded: ...

    def put(self, name: str, loaded: Loaded, *, is_idle: bool) -> None: ...


class Opening(NamedTuple):
    """The settings with which a worker opens its engines."""

    hear: Hear  # receives the engines' events
    engines: Engines  # lends idle engines, and gets them back
    known: Mapping[str, EngineHistory] = MappingProxyType({})  # from earlier starts, by engine
    guard: Callable[[], AbstractContextManager[None]] = nullcontext  # surrounds each model load
    # Variables of each engine's process, in addition to the run's own.
    environments: Mapping[str, Mapping[str, str]] = MappingProxyType({})


class Lane:
    """One engine and its requests. Each request comes back once, as the completion that settles it. Not thread-safe.

    The constructor loads the model.

    - ``name``: name in ``[engines]``; "" for ``[engine]``.
    - ``in_flight``: the requests that the engine works on, by key.

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
        """Submit requests until the window is full. Wait for a request only if the engine has nothing to do.

        Return rows that ended without the engine, for example rows that can't be rendered. One call handles at most
        ``AHEAD`` requests, so that such rows are written soon even if there are many.
        """
        settled: list[Completion] = []
        for _ in range(AHEAD):
            if len(self.in_flight) >= self._window.size:
                break
            if settled and self._requests.will_raise:
                break  # the input is broken: return these rows before ``get`` raises the error
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
        """Return the completions of requests that have ended; a request that will be retried is not among them. Wait at
        most ``timeout_s`` for the first. Adapt the window to the load."""
        settled: list[Completion] = []
        if self.in_flight:
            for completion in self._engine.poll(timeout_s):
                del self.in_flight[completion.request.key]
                settled += self._settled(completion)
        elif self._attempts:
            time.sleep(timeout_s)  # all remaining requests wait for their retry
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
        """Drop requests in flight and give the engine back. If no request was in flight, it may be kept for the next
        run."""
        self._opening.engines.put(self.name, self._loaded, is_idle=self._engine.is_idle)

    def _next(self) -> Request | Completion | None:
        """Return the next request, or the completion of a row that ended without the engine; None if neither is
        ready."""
        if (again := self._attempts.pop_due()) is not None:
            return again
        if self.in_flight and self._requests.will_raise:
            return None  # ``get`` would raise the input's error: finish running requests first
        return self._requests.get(self.name, 0 if self.in_flight else POLL_S)

    def _settled(self, completion: Completion) -> list[Completion]:
        """Return the completion that settles its request; an empty list if the request is retried."""
        if completion.generations is not None:  # a whole row; its requests are settled already
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
        ladder = Ladder(known.reductions)
        if ladder.reductions:
            settings = ", ".join(f"{key} = {value}" for key, value in ladder.overrides.items())
            self._hear(
                Line(
                    f"an earlier engine of this run ran out of memory; its reduced settings are used again: {settings}"
                )
            )
        engine = SupervisedEngine(
            self._job,
            self._hear,
            lambda job: self._load_engine(job, ladder),
            ladder=ladder,
            quarantined=self._start.options.quarantined,
        )
        with ExitStack() as held:
            held.enter_context(closing(engine))
            self._look(engine)  # checks which model a server serves, before it gets a row
            held.pop_all()
        return engine

    def _load_engine(self, job: JobConfig, ladder: Ladder) -> Engine:
        """Load the engine of ``job``, or reuse an idle one that was loaded with the same options and files.

        The supervisor calls this at the start and after each engine death. ``job`` is then the lane's job with the
        reduced options of ``ladder``.

        Raises:
            JobError, EngineError: the model can't be loaded, or a file of the run has changed.
        """
        opening, options, then = self._opening, job.engine.options, self._start.identity

        def load(launcher: Launcher) -> Loaded:
            engine = open_engine(job, launcher)
            return Loaded(engine, options, ladder.reductions, then, identity.hub_commits(self._job))

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
    """Return a function that adds the engine's name to an event and passes it to ``hear``."""

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
    """Check that the files of models, functions and prompts have not changed since this start began.

    A worker on another machine may not see all files, and compares only the files that it sees.

    Raises:
        EngineError: a file differs.
    """
    then = start.identity
    now = identity.engine_identity(start.job) | identity.of_function(start.job)
    if "prompt.files" in then:
        now["prompt.files"] = constant_files(start.job)
    if changes := identity.differences(_only(then, now), _only(now, then)):
        raise EngineError(
            "files have changed since the run began, and all answers of a run must come from the same"
            f" model and prompt: {'; '.join(changes)}. Every finished row is on disk: restore"
            " the old files and run the same command again, or begin a new run (--fresh)"
        )


def _only(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in one.items() if key in other}


def _answers_poll(engine: Engine) -> bool:
    try:
        engine.poll(0)
    except (EngineDied, EngineError):
        return False
    return True
