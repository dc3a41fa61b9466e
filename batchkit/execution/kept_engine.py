"""The engine that one processor keeps between its runs, so that its model is loaded once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from batchkit.config.tables import JobConfig
from batchkit.engines.base import Engine
from batchkit.engines.faults import EngineDied
from batchkit.engines.process.launcher import LOG, Launcher
from batchkit.errors import EngineError


class Loaded(NamedTuple):
    """An engine, and what it was loaded with: its options, the ladder's ``steps`` among them, and
    what the run's identity says of the engine's files and of ``commits`` on the hub."""

    engine: Engine
    options: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    identity: Mapping[str, Any]
    commits: Mapping[str, str]


class KeptEngine:
    """A run takes the engine, and puts it back as ``idle`` when it ends, if nothing is in flight then.
    One run at a time.

    ``folder`` is where its engines print to: a run's own folder may be moved aside while they live.
    """

    def __init__(self, job: JobConfig) -> None:
        self.folder = job.folder.with_name(f"{job.name}.engine")
        self.launcher = Launcher(self.folder / LOG)
        self.idle: Loaded | None = None

    def named(self, job: JobConfig) -> JobConfig:
        """``job`` for an engine that prints to ``folder``."""
        return job.model_copy(update={"name": self.folder.name})

    def take(self, options: Mapping[str, Any], identity: Mapping[str, Any]) -> Loaded | None:
        """The engine, if it lives and was loaded with these options from these files; else it is
        closed."""
        idle, self.idle = self.idle, None
        if idle is None:
            return None
        if (idle.options, idle.identity) == (options, identity) and _lives(idle.engine):
            return idle
        idle.engine.close()
        return None

    def close(self) -> None:
        """Release what it holds. It may be used again."""
        if self.idle is not None:
            self.idle.engine.close()
            self.idle = None
        self.launcher.close()


def _lives(engine: Engine) -> bool:
    try:
        engine.poll(0)
    except (EngineDied, EngineError):
        return False
    return True
