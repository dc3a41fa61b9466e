"""Notes about a run's engines: lines for the log, and entries in ``starts.jsonl``, which ``status`` and the next start
read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from batchkit.execution.events import (
    EngineHistory,
    EngineMessage,
    Event,
    Found,
    Message,
    Note,
    SelfChecked,
)
from batchkit.execution.places import Place
from batchkit.execution.resume import OpenRun
from batchkit.execution.screen import Screen
from batchkit.execution.start import Start
from batchkit.execution.tasks import Tasks
from batchkit.sources.rowhash import input_hash
from batchkit.storage.identity import Facts, check_found, names_same_model
from batchkit.storage.starts import Reductions


class EngineNotes:
    """The receiver of engine events in one start. It writes them to the screen and to the run's history."""

    def __init__(self, start: Start, run: OpenRun, tasks: Tasks, screen: Screen) -> None:
        self._job, self._run, self._tasks, self._screen = start.job, run, tasks, screen
        ledger, known = run.ledger, run.starts.history.added_to(run.manifest).identity
        # False if ``--set`` gives a retry another model.
        self._is_runs_own = names_same_model(known, start.identity)
        has_answers = ledger.totals.records > 0 or ledger.steps.spent.generations > 0
        is_bound = self._is_runs_own and has_answers
        self._found: Facts = known.found if is_bound else {}
        # By turn, engine name and number.
        self._histories = dict[tuple[int, str, int], EngineHistory]()

    def hear(self, event: Event) -> None:
        match event:
            case Message(text):
                self._screen.say(text)
            case EngineMessage(text):
                self._screen.say(text)
                self._run.starts.add_event(text)
                self._run.starts.save()
            case Note(text):
                self._screen.note(text)
            case Found(found):
                self._found = check_found(self._found, found)
                if self._is_runs_own:
                    then, now = self._run.starts.history.found, self._found
                    self._run.starts.learn(found={**then, **{key: now[key] for key in found}})
                    self._run.starts.save()
            case SelfChecked(findings, seconds):
                starts = self._run.starts
                starts.note(self_check=starts.last.self_check.with_findings(findings, seconds))
                starts.save()
            case EngineHistory():
                self._remember(event)
                self._run.starts.save()  # now, because the next start needs it even after a kill

    def known(self, names: Sequence[str]) -> dict[str, EngineHistory]:
        """Return the histories of the engines with these names from earlier starts, as far as they still apply.

        Reduced settings are dropped if the job's own engine options have changed since.
        """
        found = dict[str, EngineHistory]()
        for name in names:
            noted = self._run.starts.history.reductions.get(name, Reductions())
            if noted.options and noted.made_from != self._made_from(name):
                noted = Reductions()
                known = self._run.starts.history.reductions
                self._run.starts.learn(reductions={**known, name: noted})
                self._screen.say(
                    "the engine options have changed, so the settings that an earlier start reduced because memory ran"
                    " out are not used"
                )
            found[name] = EngineHistory(0, noted.options, name)
        return found

    def announce(
        self, names: Sequence[str], *, reused: Collection[str], places: Sequence[Place]
    ) -> None:
        """Log which engines are loaded for this start.

        - ``reused``: names of engines that were already loaded.
        - ``places``: the places of the engines on this machine.
        """
        workers = self._job.workers.count
        for name in names:
            engine = self._job.with_engine(name).engine
            model = engine.model or engine.kind
            loading = (
                f"model {model} is loaded already" if name in reused else f"loading model {model}"
            )
            own = [place for place in places if place.name == name]
            if len(own) > 1:
                loading += f" into {len(own)} engines, {own[0].on_gpu} on each GPU"
            text = f"{loading}, rendering the first rows meanwhile"
            if workers is not None:
                number = "workers on each free node" if workers == "auto" else f"{workers} workers"
                text = f"starting {'1 worker' if workers == 1 else number}, model {model}"
            self._screen.say(text)
            if engine.options.get("trust_remote_code"):
                self._screen.say(
                    f"trust_remote_code: the engine runs Python code that comes with {model}"
                )

    def note_versions(self, versions: Mapping[str, Mapping[str, str]]) -> None:
        """Record the versions that the engines report, keyed by engine name."""
        starts = self._run.starts
        named = {name: dict(of) for name, of in versions.items()}
        if "" in named:
            starts.note(engine=named.pop(""))
        starts.note(engines={**starts.last.engines, **named})

    def _made_from(self, name: str) -> str:
        """Return a hash of the settings that reductions of the engine ``name`` belong to."""
        options, per_gpu = self._job.with_engine(name).engine.options, self._job.workers.per_gpu
        return input_hash(options if per_gpu is None else {**options, "workers.per_gpu": per_gpu})

    def _remember(self, history: EngineHistory) -> None:
        """Note an engine's restarts and reduced settings, after the engine died. If several engines share a GPU, note
        the settings of the engine with the most reductions."""
        starts, name = self._run.starts, history.engine
        turn = self._tasks.turns.number
        self._histories[turn, name, history.number] = history
        starts.note(engine_restarts=sum(of.restarts for of in self._histories.values()))
        equal = [of.reductions for key, of in self._histories.items() if key[:2] == (turn, name)]
        reduced = Reductions(
            options=[dict(reduction) for reduction in max(equal, key=len)],
            made_from=self._made_from(name),
        )
        starts.learn(reductions={**starts.history.reductions, name: reduced})
