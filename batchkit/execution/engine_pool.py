"""Loaded engines: the pool that keeps them, and the engines of one run, which are opened from a pool."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from batchkit.config.tables import JobConfig
from batchkit.engines import mps
from batchkit.engines.base import Engine
from batchkit.engines.faults import EngineDied
from batchkit.engines.memory_ladder import Ladder
from batchkit.engines.process.launcher import Launcher, log_of
from batchkit.engines.registry import holds_model, open_engine
from batchkit.errors import EngineError
from batchkit.execution.events import EngineHistory, EngineMessage, Event, Found, Hear, Message
from batchkit.execution.places import DEVICES, Place
from batchkit.execution.restart_thread import SearchTurn
from batchkit.execution.start import Start
from batchkit.execution.supervisor import SupervisedEngine
from batchkit.rendering.templates.prompt import constant_files
from batchkit.storage.identity import Identity, differences, engine_identity, hub_commits


class EngineSpec(NamedTuple):
    """A description of the engine that a run needs.

    - ``name``: ``Place.id``. ``on_gpu``: number of engines that share its GPU.
    - ``options``, ``identity``: the options and file hashes with which the engine must be loaded.
    - ``environment``: variables that its process gets in addition to the run's own.
    """

    name: str
    options: Mapping[str, Any]
    identity: Identity
    environment: Mapping[str, str] = MappingProxyType({})
    on_gpu: int = 1


class LoadedEngine(NamedTuple):
    """A loaded engine.

    - ``spec``: the settings and files from which it was loaded. The options include all reductions.
    - ``reductions``: options that were reduced after out-of-memory errors.
    - ``commits``: commit hashes of models from the hub.
    """

    engine: Engine
    spec: EngineSpec
    reductions: Sequence[Mapping[str, Any]]
    commits: Mapping[str, str]

    def meets(self, wanted: EngineSpec) -> bool:
        its = self.spec
        return (its.options, its.identity) == (wanted.options, wanted.identity)


class Pool(Protocol):
    """A provider of loaded engines: ``EnginePool``, or ``SharedEngines`` that several runs use."""

    @property
    def idle(self) -> Mapping[str, LoadedEngine]: ...

    def prepare(self, wanted: EngineSpec, kind: str) -> None: ...

    def evict(self, places: Sequence[Place]) -> None: ...

    def cancel(self, name: str) -> None: ...

    def get(self, wanted: EngineSpec, load: Callable[[Launcher], LoadedEngine]) -> LoadedEngine: ...

    def put(self, loaded: LoadedEngine, *, is_idle: bool) -> None: ...


class EnginePool:
    """Loaded engines that outlive a run, so that the next run does not load them again. It serves one run at a time.

    A run takes an engine, and returns it at its end if no request is in flight.

    - ``idle``: engines that no run uses now, by name.
    - ``log``: file to which ``[engine]`` prints. It should be outside the run folder, which may be moved aside while
      the engine lives on.
    """

    def __init__(self, log: Path) -> None:
        self.idle: dict[str, LoadedEngine] = {}
        self._log = log
        self._launchers: dict[str, Launcher] = {}

    def launcher(self, wanted: EngineSpec) -> Launcher:
        """Return the launcher for the processes of the engine ``wanted``."""
        known = self._launchers.get(wanted.name)
        if known is None or known.environment != wanted.environment:
            if known is not None:
                known.close()
            known = Launcher(log_of(self._log, wanted.name), wanted.environment)
            self._launchers[wanted.name] = known
        return known

    def get(self, wanted: EngineSpec, load: Callable[[Launcher], LoadedEngine]) -> LoadedEngine:
        """Return the idle engine if it is alive and matches ``wanted``. Otherwise close it and call ``load``."""
        idle = self.idle.pop(wanted.name, None)
        if idle is not None:
            if idle.meets(wanted) and _answers_poll(idle.engine):
                return idle
            idle.engine.close()
        return load(self.launcher(wanted))

    def prepare(self, wanted: EngineSpec, kind: str) -> None:
        """Start to import the libraries of the engine ``wanted``, which is of ``kind``."""
        self.launcher(wanted).prepare(kind)

    def evict(self, places: Sequence[Place]) -> None:
        """Close idle engines that would take memory from the engines of ``places``."""
        for name in [name for name, loaded in self.idle.items() if not fits(loaded.spec, places)]:
            self.idle.pop(name).engine.close()

    def cancel(self, name: str) -> None:
        """Kill the process that loads the engine ``name``."""
        if (launcher := self._launchers.get(name)) is not None:
            launcher.close()

    def put(self, loaded: LoadedEngine, *, is_idle: bool) -> None:
        """Take an engine back at the end of a run. Close the engine unless ``is_idle``, because requests may be in
        flight."""
        if is_idle:
            self.idle[loaded.spec.name] = loaded
        else:
            loaded.engine.close()

    def close_idle(self) -> None:
        """Close all idle engines, but not the launchers, which have imported the engines' libraries."""
        for loaded in self.idle.values():
            loaded.engine.close()
        self.idle = {}

    def close(self) -> None:
        """Close all idle engines and launchers. The object may be used again."""
        self.close_idle()
        for launcher in self._launchers.values():
            launcher.close()
        self._launchers = {}


def fits(spec: EngineSpec, places: Sequence[Place]) -> bool:
    """Return whether one of ``places`` has this engine's name and share of a GPU."""
    return (spec.name, spec.on_gpu) in {(place.id, place.on_gpu) for place in places}


class RunEngines:
    """The engines of one run. They are opened from ``pool``, supervised, and given back.

    - ``places``: the engines to open.
    - ``hear``: receives the engines' events.
    - ``known``: histories of earlier starts, by engine name.
    - ``guard``: surrounds each model load.
    """

    def __init__(
        self,
        start: Start,
        pool: Pool,
        places: Sequence[Place],
        hear: Hear,
        *,
        known: Mapping[str, EngineHistory] = MappingProxyType({}),
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._start, self._pool, self.places, self.hear = start, pool, places, hear
        self._known, self._guard = known, guard
        self._loaded: dict[str, LoadedEngine] = {}
        self._loading = threading.Lock()  # a loading engine measures the free memory of its GPU
        self._turns = defaultdict[str, SearchTurn](SearchTurn)  # by GPU

    def open(self, place: Place) -> SupervisedEngine:
        """Return the engine of ``place``, loaded and supervised. It was checked which model a server serves.

        Raises:
            JobError, EngineError: the model can't be loaded, or a file of the run has changed.
        """
        job, hear = place.job_of(self._start.job), self.hear_of(place)
        idle = self._pool.idle.get(place.id)
        known = self._known.get(place.name, EngineHistory())
        ladder = Ladder(known.reductions if idle is None else idle.reductions)
        if ladder.reductions:
            settings = ", ".join(f"{key} = {value}" for key, value in ladder.overrides.items())
            text = "an earlier engine of this run ran out of memory; its reduced settings are used again"
            hear(Message(f"{text}: {settings}"))
        engine = SupervisedEngine(
            job,
            hear,
            lambda reduced, hear: self._load(reduced, place, ladder, hear),
            ladder=ladder,
            quarantined=self._start.options.quarantined,
            beside=self._turns[place.environment[DEVICES]] if place.of > 1 else None,
        )
        with ExitStack() as held:
            held.enter_context(closing(engine))
            engine.load()  # raises if a server serves another model than before
            held.pop_all()
        return engine

    def give_back(self, place: Place, engine: SupervisedEngine) -> None:
        """Give the engine back to the pool. If no request is in flight, it may be kept for the next run."""
        engine.stop_restart(lambda: self._pool.cancel(place.id))
        self._pool.put(self._loaded[place.id], is_idle=engine.is_idle)

    def hear_of(self, place: Place) -> Hear:
        """Return the receiver for events of the engine of ``place``, which is added to the events."""
        return _named(self.hear, place) if place.label else self.hear

    def prepare(self) -> None:
        """Close idle engines that these engines replace. Start to import the libraries of several engines at the same
        time; the models are loaded one by one."""
        self._pool.evict(self.places)
        for place in self.places:
            job = place.job_of(self._start.job)
            is_own = holds_model(job.engine.kind) and not job.engine.in_process
            if place.of > 1 and is_own and place.id not in self._pool.idle:
                spec = self._spec_of(job, place, self.hear_of(place))
                self._pool.prepare(spec, job.engine.kind)

    def _spec_of(self, job: JobConfig, place: Place, hear: Hear) -> EngineSpec:
        """Return the spec of the engine of ``job`` in ``place``. Start MPS if engines share the GPU."""
        environment = dict(place.environment)
        if place.on_gpu > 1:
            environment |= mps.environment(lambda text: hear(Message(text)))
        options, files = job.engine.options, self._start.identity
        return EngineSpec(place.id, options, files, environment, place.on_gpu)

    def _load(self, reduced: JobConfig, place: Place, ladder: Ladder, hear: Hear) -> Engine:
        """Load the engine of ``reduced``, or take an idle one that was loaded with the same options and files.

        The supervisor calls this at the start and after each engine death. ``reduced`` is the place's job with the
        reduced options of ``ladder``.
        """
        spec = self._spec_of(reduced, place, hear)

        def load(launcher: Launcher) -> LoadedEngine:
            engine = open_engine(reduced, launcher)
            return LoadedEngine(engine, spec, ladder.reductions, hub_commits(reduced.engine))

        # Only the first load is in the run's thread, which handles signals.
        in_thread = place.of > 1 and place.id in self._loaded
        guard = nullcontext() if in_thread else self._guard()
        with self._loading, guard, ExitStack() as held:
            loaded = self._pool.get(spec, load)
            held.enter_context(closing(loaded.engine))
            check_unchanged(self._start)
            if loaded.commits:
                hear(Found({"engine.commits": loaded.commits}))
            held.pop_all()
        self._loaded[place.id] = loaded
        return loaded.engine


def _named(hear: Hear, place: Place) -> Hear:
    """Return a function that adds the engine's name and number to an event and passes it to ``hear``."""

    def hear_of_it(event: Event) -> None:
        match event:
            case Message(text) | EngineMessage(text):
                event = event._replace(text=f"{place.label}: {text}")
            case EngineHistory():
                event = event._replace(engine=place.name, number=place.number)
            case Found(found) if place.name:
                event = Found(
                    {f"engines.{place.name}.{k.removeprefix('engine.')}": found[k] for k in found}
                )
        hear(event)

    return hear_of_it


def check_unchanged(start: Start) -> None:
    """Check that the files of models, functions and prompts have not changed since this start began.

    A worker on another machine may not see all files, and compares only the files that it sees.

    Raises:
        EngineError: a file differs.
    """
    then, now = start.identity, engine_identity(start.job)
    if "prompt.files" in then.found:
        now = now.with_facts({"prompt.files": constant_files(start.job)})
    seen = {key: now.files.get(key, old) for key, old in then.files.items()}
    if changes := differences(then, replace(now, job=then.job, files=seen)):
        raise EngineError(
            "files have changed since the run began, and all answers of a run must come from the same"
            f" model and prompt: {'; '.join(changes)}. Every finished row is on disk: restore"
            " the old files and run the same command again, or begin a new run (--fresh)"
        )


def _answers_poll(engine: Engine) -> bool:
    try:
        engine.poll(0)
    except (EngineDied, EngineError):
        return False
    return True
