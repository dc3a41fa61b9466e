"""One engine of a worker: opened, supervised, and fed with the requests that are for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from typing import Any

from batchkit.config.tables import JobConfig
from batchkit.engines.base import Engine
from batchkit.engines.memory_ladder import Ladder
from batchkit.engines.process.launcher import Launcher
from batchkit.engines.registry import open_engine
from batchkit.errors import EngineError
from batchkit.execution.events import EngineHistory, EngineLine, Event, Found, Hear, Line, PoolLoad
from batchkit.execution.feeder import Feeder
from batchkit.execution.kept_engine import KeptEngine, Loaded
from batchkit.execution.supervisor import SupervisedEngine
from batchkit.rendering.constant_files import constant_files
from batchkit.storage import identity
from batchkit.types import Completion


class FedEngine:
    """The engine ``name`` of ``job``, "" for ``[engine]``. Its model is loaded in the constructor, with
    settings that an earlier start found to be safe (``known``).

    ``feeder`` makes what feeds it, from the engine, its job and ``name``. ``environment``: variables of
    its process, besides the run's own. Other arguments are as Worker's.

    Raises:
        JobError, EngineError: the model can't be loaded.
    """

    def __init__(
        self,
        job: JobConfig,
        name: str,
        feeder: Callable[[Engine, JobConfig, str], Feeder],
        hear: Hear,
        known: EngineHistory,
        *,
        log: Path,
        engine_identity: Mapping[str, Any],
        quarantined: Collection[int],
        opening: Callable[[], AbstractContextManager[None]],
        kept: KeptEngine | None,
        environment: Mapping[str, str],
    ) -> None:
        self.name = name
        self._hear = hear if not name else _named(hear, name)
        self._loaded: Loaded
        own = job.with_engine(name)
        idle = None if kept is None else kept.idle.get(name)
        ladder = Ladder(known.steps if idle is None else idle.steps)
        if ladder.steps:
            self._hear(Line(f"engine settings remembered: {dict(ladder.overrides)}"))
        with ExitStack() as held:
            launcher = (
                held.enter_context(closing(Launcher(log, environment)))
                if kept is None
                else kept.launcher(name, environment)
            )

            def open_one(job_now: JobConfig) -> Engine:
                with opening(), ExitStack() as opened:
                    options = job_now.engine.options
                    loaded = None if kept is None else kept.take(name, options, engine_identity)
                    if loaded is None:
                        to_open = job_now if kept is None else kept.named(job_now)
                        engine = open_engine(to_open, launcher)
                        opened.enter_context(closing(engine))
                        _check_unchanged(job, engine_identity)
                        commits = identity.hub_commits(own)
                        loaded = Loaded(engine, options, ladder.steps, engine_identity, commits)
                    else:
                        opened.enter_context(closing(loaded.engine))
                    if loaded.commits:
                        self._hear(Found({"engine.commits": loaded.commits}))
                    opened.pop_all()
                    self._loaded = loaded
                    return loaded.engine

            self._engine = SupervisedEngine(
                own,
                self._hear,
                ladder=ladder,
                quarantined=quarantined,
                among_accidents=known.among_accidents,
                suspicions=known.suspicions,
                open_engine=open_one,
            )
            held.callback(self._release, kept)
            self._engine.load()  # it says which model a server serves, before it gets a row
            self._held = held.pop_all()
        self._feeder = feeder(self._engine, own, name)
        self.unfinished_tokens = 0
        self.load = PoolLoad(self._feeder.window.size)

    def fill(self) -> list[Completion]:
        return self._feeder.fill()

    def poll(self, timeout_s: float) -> list[Completion]:
        """What it has finished; then adapts the window to its load."""
        settled = self._feeder.poll(timeout_s)
        window = self._feeder.window
        change = window.fit(self._engine.max_num_seqs)
        load = self._engine.load()
        self.unfinished_tokens = load.unfinished_tokens
        change = change or window.adapt(load, self.in_flight)
        preemptions = self.load.preemptions + load.preempted
        self.load = PoolLoad(
            window.size, load.running, load.waiting, load.kv_cache_usage, preemptions
        )
        if change is not None:
            self._hear(Line(f"window {change.old} → {change.new}: {change.reason}"))
        return settled

    @property
    def max_num_seqs(self) -> int:
        return self._engine.max_num_seqs

    @property
    def versions(self) -> Mapping[str, str]:
        return self._engine.versions

    @property
    def in_flight(self) -> int:
        return len(self._feeder.in_flight)

    @property
    def is_done(self) -> bool:
        return self._feeder.is_done

    @property
    def retried(self) -> int:
        return self._feeder.retried

    @property
    def window(self) -> int:
        return self._feeder.window.size

    def close(self) -> None:
        self._held.close()

    def _release(self, kept: KeptEngine | None) -> None:
        if kept is None or not self._engine.is_idle:
            self._engine.close()
        else:
            kept.idle[self.name] = self._loaded


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


def _check_unchanged(job: JobConfig, then: Mapping[str, Any]) -> None:
    """Files that were replaced while the engine loaded them show here, too.

    A worker on another machine may not see all files that the run saw: the others are compared.

    Raises:
        EngineError: they are other files than the run began with.
    """
    now = identity.engine_identity(job) | identity.of_function(job)
    if "prompt.files" in then:
        now["prompt.files"] = constant_files(job)
    check_same_files(then, now)


def check_same_files(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises EngineError if what both have of a run's identity differs."""
    if changes := identity.differences(_only(then, now), _only(now, then)):
        raise EngineError(
            "found other files than those that the run began with, and a run's answers are all"
            f" of one model and prompt: {'; '.join(changes)}. Every finished row is on disk: bring"
            " the old files back and run the same command again, or begin a new run (--fresh)"
        )


def _only(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in one.items() if key in other}
