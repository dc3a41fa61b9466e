"""Loaded engines, by name, and the processes that their own are forked from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from batchkit.engines.base import Engine
from batchkit.engines.faults import EngineDied
from batchkit.engines.process.launcher import Launcher, log_of
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
    """A run takes an engine, and puts it back into ``idle``, by its name, when it ends, if nothing is in
    flight then. One run at a time; a processor's outlives its runs.

    ``log`` is what ``[engine]`` prints to: outside the run's folder if the engine outlives the run,
    since that folder may be moved aside.
    """

    def __init__(self, log: Path) -> None:
        self.idle: dict[str, Loaded] = {}
        self._log = log
        self._launchers: dict[str, Launcher] = {}

    def launcher(self, name: str, environment: Mapping[str, str]) -> Launcher:
        """What starts the processes of the engine ``name``."""
        if name not in self._launchers:
            self._launchers[name] = Launcher(log_of(self._log, name), environment)
        return self._launchers[name]

    def take(
        self, name: str, options: Mapping[str, Any], identity: Mapping[str, Any]
    ) -> Loaded | None:
        """The engine, if it lives and was loaded with these options from these files; else it is
        closed."""
        idle = self.idle.pop(name, None)
        if idle is None:
            return None
        if (idle.options, idle.identity) == (options, identity) and _lives(idle.engine):
            return idle
        idle.engine.close()
        return None

    def close(self) -> None:
        """Release what it holds. It may be used again."""
        for loaded in self.idle.values():
            loaded.engine.close()
        for launcher in self._launchers.values():
            launcher.close()
        self.idle, self._launchers = {}, {}


def _lives(engine: Engine) -> bool:
    try:
        engine.poll(0)
    except (EngineDied, EngineError):
        return False
    return True
