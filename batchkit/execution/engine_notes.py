"""What a run's manifest keeps about its engines, for ``status`` and for the next start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from batchkit.config.tables import JobConfig
from batchkit.execution.bisection import Suspicion
from batchkit.execution.events import EngineHistory, Hear, Line
from batchkit.sources.rowhash import known_hashes
from batchkit.storage.identity import is_learned
from batchkit.storage.manifest import Manifest, Suspects


def known(
    job: JobConfig, manifest: Manifest, may_come: Callable[[int], bool], hear: Hear
) -> EngineHistory:
    """What earlier starts have learned, as far as it holds for this one.

    ``may_come`` returns whether this start reads the row of that index.
    """
    if manifest.forget_other_steps(_settings_hash(job.engine.options)):
        hear(Line("engine options have changed: smaller settings are forgotten"))
    # Where the search for a poison row was when an earlier start was killed.
    is_current = manifest.suspects.of == _suspects_of(job, manifest)
    groups = manifest.suspects.groups if is_current else []
    suspicions = [Suspicion.known(group).only(may_come) for group in groups]
    suspicions = [found for found in suspicions if found.rows]
    if suspicions:
        n = sum(len(suspicion.rows) for suspicion in suspicions)
        hear(Line(f"the search for a row that kills the engine continues: {n} rows are suspected"))
    return EngineHistory(0, list(manifest.engine_steps), manifest.engine_accidents, suspicions)


def remember(job: JobConfig, manifest: Manifest, history: EngineHistory) -> None:
    """Note in ``manifest`` what an engine's death taught."""
    manifest.last_start.engine_restarts = history.restarts
    manifest.engine_steps = [dict(step) for step in history.steps]
    manifest.engine_accidents = history.among_accidents
    groups = [suspicion.noted() for suspicion in history.suspicions]
    manifest.suspects = Suspects(of=_suspects_of(job, manifest), groups=groups)


def _suspects_of(job: JobConfig, manifest: Manifest) -> str:
    """A hash of the settings that suspicions hold for; with others, rows may do no harm."""
    begun = {key: value for key, value in manifest.identity.items() if not is_learned(key)}
    return _settings_hash({"identity": begun, "options": job.engine.options})


def _settings_hash(settings: Mapping[str, Any]) -> str:
    """As earlier versions made it."""
    return known_hashes(settings)[-1]
