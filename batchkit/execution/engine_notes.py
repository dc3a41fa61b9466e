"""Notes about a run's engines: lines for the log, and entries in the manifest, which ``status`` and the next start
read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from batchkit.execution.events import EngineHistory, EngineLine, Event, Found, Line, Note
from batchkit.execution.resume import OpenRun
from batchkit.execution.screen import Screen
from batchkit.execution.start import Start
from batchkit.execution.tasks import Tasks
from batchkit.sources.rowhash import input_hash
from batchkit.storage.identity import check_found, names_same_model
from batchkit.storage.manifest import forget_other_reductions


class EngineNotes:
    """The receiver of engine events in one start. It writes them to the screen and to the manifest."""

    def __init__(self, start: Start, run: OpenRun, tasks: Tasks, screen: Screen) -> None:
        self._job, self._run, self._tasks, self._screen = start.job, run, tasks, screen
        manifest, ledger = run.manifest, run.ledger
        # False if ``--set`` gives a retry another model.
        self._is_runs_own = names_same_model(manifest.identity, start.identity)
        has_answers = ledger.totals.records > 0 or ledger.steps.spent.generations > 0
        is_bound = self._is_runs_own and has_answers
        self._found: Mapping[str, Any] = manifest.identity if is_bound else {}
        self._restarts = Counter[tuple[int, str]]()

    def hear(self, event: Event) -> None:
        match event:
            case Line(text):
                self._screen.say(text)
            case EngineLine(text):
                self._screen.say(text)
                self._run.manifest.last_start.note_event(text)
                self._run.save()
            case Note(text):
                self._screen.note(text)
            case Found(found):
                self._found = check_found(self._found, found)
                if self._is_runs_own:
                    self._run.manifest.identity |= {key: self._found[key] for key in found}
                    self._run.save()
            case EngineHistory():
                self._remember(event)
                self._run.save()  # now, because the next start needs it even after a kill

    def known(self, names: Sequence[str]) -> dict[str, EngineHistory]:
        """Return the histories of the engines with these names from earlier starts, as far as they still apply.

        Reduced settings are dropped if the job's own engine options have changed since.
        """
        found = dict[str, EngineHistory]()
        for name in names:
            noted = self._run.manifest.notes_of(name)
            options = self._job.with_engine(name).engine.options
            if forget_other_reductions(noted, input_hash(options)):
                self.hear(
                    Line(
                        "the engine options have changed, so the settings that an earlier start reduced because memory ran out are not used"
                    )
                )
            found[name] = EngineHistory(0, list(noted.engine_reductions), name)
        return found

    def announce(self, names: Sequence[str], *, reused: Collection[str]) -> None:
        """Log which engines are loaded for this start. ``reused``: engines that were already loaded."""
        workers = self._job.workers.count
        for name in names:
            engine = self._job.with_engine(name).engine
            model = engine.model or engine.kind
            loading = (
                f"model {model} is loaded already" if name in reused else f"loading model {model}"
            )
            text = f"{loading}, rendering the first rows meanwhile"
            if workers is not None:
                text = (
                    f"starting {workers} {'worker' if workers == 1 else 'workers'}, model {model}"
                )
            self._screen.say(text)
            if engine.options.get("trust_remote_code"):
                self._screen.say(
                    f"trust_remote_code: the engine runs Python code that comes with {model}"
                )

    def note_versions(self, versions: Mapping[str, Mapping[str, str]]) -> None:
        """Record the versions that the engines report, keyed by engine name."""
        start = self._run.manifest.last_start
        named = {name: dict(of) for name, of in versions.items()}
        if "" in named:
            start.engine = named.pop("")
        if named:
            start.engines = {**start.engines, **named}

    def _remember(self, history: EngineHistory) -> None:
        """Write an engine's restarts and reduced settings to the manifest, after the engine died."""
        manifest = self._run.manifest
        self._restarts[self._tasks.turns.number, history.engine] = history.restarts
        manifest.last_start.engine_restarts = self._restarts.total()
        noted = manifest.notes_of(history.engine)
        noted.engine_reductions = [dict(reduction) for reduction in history.reductions]
