"""What a run's manifest keeps about its engines, for ``status`` and for the next start."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from batchkit.config.tables import JobConfig
from batchkit.execution.bisection import Suspicion
from batchkit.execution.events import EngineHistory, Hear, Line
from batchkit.execution.resume import OpenRun
from batchkit.sources.rowhash import input_hash
from batchkit.storage.manifest import Suspects


class EngineNotes:
    """Reads the notes of earlier starts, and writes those of this one."""

    def __init__(self, job: JobConfig, run: OpenRun) -> None:
        self._options = job.engine.options
        self._manifest, self._save = run.manifest, run.save

    def known(self, may_come: Callable[[int], bool], hear: Hear) -> EngineHistory:
        """What earlier starts have learned, as far as it holds for this one.

        ``may_come`` returns whether this start reads the row of that index.
        """
        if self._manifest.forget_other_steps(input_hash(self._options)):
            hear(Line("engine options have changed: smaller settings are forgotten"))
        suspicions = [found for found in self._suspicions(may_come) if found.rows]
        if suspicions:
            n = sum(len(suspicion.rows) for suspicion in suspicions)
            hear(
                Line(f"the search for a row that kills the engine goes on: {n} rows are suspected")
            )
        among_accidents = self._manifest.engine_accidents
        return EngineHistory(0, list(self._manifest.engine_steps), among_accidents, suspicions)

    def remember(self, history: EngineHistory) -> None:
        """Save what an engine's death taught at once: the next start needs it."""
        self._manifest.last_start.engine_restarts = history.restarts
        self._manifest.engine_steps = [dict(step) for step in history.steps]
        self._manifest.engine_accidents = history.among_accidents
        self._manifest.suspects = Suspects(
            of=self._suspects_of(), groups=[suspicion.noted() for suspicion in history.suspicions]
        )
        self._save()

    def _suspicions(self, may_come: Callable[[int], bool]) -> Iterator[Suspicion]:
        """Where the search for a poison row was when an earlier start was killed."""
        if self._manifest.suspects.of == self._suspects_of():
            for group in self._manifest.suspects.groups:
                yield Suspicion.known(group).only(may_come)

    def _suspects_of(self) -> str:
        """A hash of the settings that suspicions hold for; with others, rows may do no harm."""
        return input_hash({"identity": self._manifest.identity, "options": self._options})
