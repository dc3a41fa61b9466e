"""What the log says about the engines of a run, and what its manifest keeps for ``status`` and the next start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from batchkit.config.tables import JobConfig
from batchkit.execution.bisection import Suspicion
from batchkit.execution.events import EngineHistory, Hear, Line
from batchkit.sources.rowhash import known_hashes
from batchkit.storage.identity import is_learned
from batchkit.storage.manifest import Manifest, Start, Suspects, forget_other_steps


def known(
    job: JobConfig, manifest: Manifest, may_come: Callable[[int], bool], hear: Hear, engine: str
) -> EngineHistory:
    """What earlier starts have learned of the engine of that name, as far as it holds for this one.

    ``may_come`` returns whether this start reads the row of that index.
    """
    noted, options = manifest.notes_of(engine), job.with_engine(engine).engine.options
    if forget_other_steps(noted, _settings_hash(options)):
        hear(Line("engine options have changed: smaller settings are forgotten"))
    # Where the search for a poison row was when an earlier start was killed.
    is_current = noted.suspects.of == _suspects_of(options, manifest)
    groups = noted.suspects.groups if is_current else []
    suspicions = [Suspicion.known(group).only(may_come) for group in groups]
    suspicions = [found for found in suspicions if found.rows]
    if suspicions:
        n = sum(len(suspicion.rows) for suspicion in suspicions)
        hear(Line(f"the search for a row that kills the engine continues: {n} rows are suspected"))
    return EngineHistory(0, list(noted.engine_steps), noted.engine_accidents, suspicions, engine)


def note_versions(start: Start, versions: Mapping[str, Mapping[str, str]]) -> None:
    """Note in ``start`` what engines, by name, report about themselves."""
    named = {name: dict(of) for name, of in versions.items()}
    if "" in named:
        start.engine = named.pop("")
    if named:
        start.engines = {**start.engines, **named}


def remember(job: JobConfig, manifest: Manifest, history: EngineHistory, restarts: int) -> None:
    """Note in ``manifest`` what an engine's death taught; ``restarts`` are those of all engines."""
    manifest.last_start.engine_restarts = restarts
    noted = manifest.notes_of(history.engine)
    noted.engine_steps = [dict(step) for step in history.steps]
    noted.engine_accidents = history.among_accidents
    groups = [suspicion.noted() for suspicion in history.suspicions]
    options = job.with_engine(history.engine).engine.options
    noted.suspects = Suspects(of=_suspects_of(options, manifest), groups=groups)


def _suspects_of(options: Mapping[str, Any], manifest: Manifest) -> str:
    """A hash of the settings that suspicions hold for; with others, rows may do no harm."""
    begun = {key: value for key, value in manifest.identity.items() if not is_learned(key)}
    return _settings_hash({"identity": begun, "options": options})


def _settings_hash(settings: Mapping[str, Any]) -> str:
    """As earlier versions made it."""
    return known_hashes(settings)[-1]


def announced(job: JobConfig, name: str, *, is_kept: bool) -> Iterator[str]:
    """What the log says before the engine of this name is loaded, or taken again if it ``is_kept``."""
    engine, workers = job.with_engine(name).engine, job.run.workers
    model = engine.model or engine.kind
    if workers is None:
        loading = f"model {model} is loaded already," if is_kept else f"loading model {model},"
        yield f"{loading} rendering the first rows meanwhile"
    else:
        yield f"starting {workers} {'worker' if workers == 1 else 'workers'}, model {model}"
    if engine.options.get("trust_remote_code"):
        yield f"trust_remote_code: Python code that comes with {model} is run"
