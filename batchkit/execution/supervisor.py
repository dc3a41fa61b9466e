"""The supervisor of an engine: it restarts the engine after a death and finds poison rows, the rows that kill engines.

It implements Engine, so a lane (``lane.py``) does not notice deaths. Every submitted request comes back exactly once, a
poison row with its error. After a death, the requests in flight are replayed in halves (``bisection.py``), and new
requests wait until this search has ended.

If memory ran out, the next engine gets smaller settings (``engines/memory_ladder.py``). The smaller settings are undone
if the search shows that a poison row was the cause.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from batchkit.config.tables import JobConfig
from batchkit.engines.base import Engine, EngineLoad
from batchkit.engines.faults import EngineDied, Fault, StartFailed
from batchkit.engines.memory_ladder import Ladder
from batchkit.errors import (
    EngineCrashError,
    EngineError,
    JobError,
    RowError,
    RowOutOfMemoryError,
    RowTimeoutError,
)
from batchkit.execution.bisection import RowSearch
from batchkit.execution.events import EngineHistory, EngineMessage, Found, Hear, Note
from batchkit.execution.host_memory import KILLED, HostMemory
from batchkit.execution.restart_thread import RestartThread, SearchTurn
from batchkit.types import Completion, Key, Request

LONGEST_PAUSE_S = 10  # between attempts to open an engine
_DEATH = "it died"
_UNKNOWN_LIMITS = {"max_num_seqs": 256}  # vLLM's default, if the engine died before it reported


class SupervisedEngine:
    """A wrapper that restarts a dead engine and finds the rows that kill it.

    - ``hear``: called with events, and with an EngineHistory before the next engine is opened.
    - ``open_engine``: loads the engine; it passes events to the given function.
    - ``ladder``: options that an earlier start reduced.
    - ``quarantined``: indexes of rows that killed an engine in an earlier start; each runs alone, and only once.
    - ``beside``: the turn that several engines on one GPU share; None for an engine without others. With it, the engine
      is restarted in a thread. ``poll`` returns nothing meanwhile, so that the caller can serve the others.
    - ``restarts`` (attribute): number of attempts to open an engine after the first.

    Raises:
        JobError: the engine's options are invalid.
        EngineError: the engine could not start, or died more than ``run.max_engine_restarts`` times without an answer.
    """

    def __init__(
        self,
        job: JobConfig,
        hear: Hear,
        open_engine: Callable[[JobConfig, Hear], Engine],
        *,
        ladder: Ladder | None = None,
        quarantined: Iterable[int] = (),
        beside: SearchTurn | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._job, self._hear, self._open_engine = job, hear, open_engine
        self._sleep = sleep
        self.ladder = ladder or Ladder(())
        self._search = RowSearch(quarantined)
        self._host_memory = HostMemory(job.run.max_host_gb, self._say)
        self._in_flight: dict[Key, Request] = {}
        self._held: deque[Request] = deque()
        self._deaths = 0
        self._restart_due = ""
        self.restarts = 0
        self._served: Mapping[str, Any] = {}
        self._thread: RestartThread | None = None  # the first load is in the caller's thread
        self._engine = self._open()
        self.ladder.save()
        if beside is not None:
            self._thread = RestartThread(hear, beside)
            self._hear = self._thread.hear

    @property
    def max_num_seqs(self) -> int:
        return self._engine.max_num_seqs

    @property
    def limits(self) -> Mapping[str, Any]:
        return self._engine.limits

    @property
    def versions(self) -> Mapping[str, str]:
        return self._engine.versions

    def submit(self, request: Request) -> None:
        if self._search.is_quarantined(request):
            self._search.suspect(request)
        elif self._must_hold:
            self._held.append(request)
        else:
            self._hand_over(request)

    def poll(self, timeout_s: float) -> Sequence[Completion]:
        try:
            return self._poll(timeout_s)
        finally:
            if self._thread is not None:
                self._thread.report()
                if not self._in_flight and not len(self._search):
                    # An idle engine is not polled again, so the turn must not wait for that.
                    self._thread.turn.give_up(self)

    def _poll(self, timeout_s: float) -> Sequence[Completion]:
        if not self._in_flight:
            self._submit_held()
        if self._thread is not None and self._thread.is_working:
            self._thread.wait(timeout_s)
            return []
        try:
            done = self._engine.poll(timeout_s)
        except EngineDied as death:
            if not self._job.run.max_engine_restarts:
                raise
            return self._bury(death)
        for completion in done:
            del self._in_flight[completion.request.key]
        self._count_success(done)
        return self._search.drop_probe(done)

    def abort(self, requests: Sequence[Request]) -> None:
        self._engine.abort(requests)

    def load(self) -> EngineLoad:
        """Return the engine's load. Requests that wait in this object count as waiting."""
        load = self._engine.load()
        for text in load.events:
            self._say(text)
        if load.served != self._served:
            self._served = load.served
            self._hear(Found({"engine.served": load.served}))
        self._watch_memory(load.host_bytes / 2**30)
        return load._replace(waiting=load.waiting + len(self._held) + len(self._search))

    def close(self) -> None:
        self._engine.close()

    def stop_restart(self, cancel: Callable[[], None]) -> None:
        """End a restart in a thread. ``cancel`` kills the process that loads the engine."""
        if self._thread is not None:
            self._thread.stop(cancel)

    @property
    def is_idle(self) -> bool:
        """True if the engine is alive, and no request is in flight or waits for it."""
        return not self._in_flight and not self._must_hold

    @property
    def _must_hold(self) -> bool:
        return bool(self._search or self._restart_due or self._held)

    def _hand_over(self, request: Request) -> None:
        self._in_flight[request.key] = request
        self._engine.submit(request)

    def _submit_held(self) -> None:
        """Restart the engine if this is due, then submit suspects or waiting requests. Call it while no request is in
        flight."""
        if self._restart_due and not self._is_restarted():
            return
        if self._search and self._thread is not None and not self._thread.turn.take(self):
            return
        if self._search and self._deaths > self._job.run.max_engine_restarts // 2:
            # A search that needs many deaths would otherwise be given up at ``run.max_engine_restarts``: an answer
            # resets their count.
            self._search.prove_sound(self._held)
        for request in self._search.next_group():
            self._hand_over(request)
        while not self._search and self._held:
            self._hand_over(self._held.popleft())

    def _count_success(self, done: Sequence[Completion]) -> None:
        answered = [completion.request for completion in done if completion.error is None]
        if not answered:
            return
        self._search.note_answers(answered)
        self._deaths = 0
        self._host_memory.note_answers(len(answered))
        if not self._search:
            self.ladder.save()

    def _watch_memory(self, host_gb: float) -> None:
        """Plan a restart if the engine's process needs more memory than ``run.max_host_gb``. ``host_gb``: 0 if
        unknown."""
        if self._restart_due or not (excess := self._host_memory.excess(host_gb)):
            return
        self._restart_due = excess
        if self._host_memory.note_restart():
            self._make_smaller(Fault("oom", "run.max_host_gb", excess))

    def _bury(self, death: EngineDied) -> list[Completion]:
        """Handle the death of the engine. If it proves a poison row, return this row as failed.

        The next engine is opened later by ``poll``, because that may take minutes or fail.
        """
        fault = self._host_memory.judged(death.fault)
        in_flight = self._search.without_probe(self._in_flight.values())
        self._in_flight.clear()
        self._restart_due = _DEATH
        rows = "1 row" if len(in_flight) == 1 else f"{len(in_flight)} rows"
        self._say(f"engine died ({fault.kind}) with {rows} in flight: {fault}")
        if death.stacks:
            self._hear(Note(death.stacks))
        was_expected = len(in_flight) == 1 and self._search.is_quarantined(in_flight[0])
        poison = self._poison(death, in_flight)
        if not was_expected:
            self._count_death(fault, may_raise=poison is None)
        if fault.kind == "oom":
            if poison is None:
                self._make_smaller(fault, alone=len(in_flight) <= 1)
            else:  # a row that runs out of memory alone does not prove the batch too large
                self.ladder.restore()
                self._remember()
        if poison is None:
            return []
        row = f"row {poison.row.index} (id {poison.row.id})"
        if poison.call is not None:
            row += f", {poison.call.in_words},"
        if death.request is None:
            self._search.quarantine(poison)
            self._say(f"{row} kills the engine even if it runs alone: the row has failed")
        else:
            self._say(f"{row} killed the engine: the row has failed")
        return [Completion(poison, error=_row_error(fault))]

    def _poison(self, death: EngineDied, in_flight: list[Request]) -> Request | None:
        """Return the row that killed the engine: the one that the engine names, or the one that the search has
        isolated. Return None if it is not known yet."""
        if death.request not in in_flight:
            fault = death.fault
            cause = KILLED if fault.type == KILLED else f"{fault.kind} {fault.type}"
            return self._search.record_death(in_flight, cause)
        in_flight.remove(death.request)
        self._held.extendleft(reversed(in_flight))
        return death.request

    def _count_death(self, cause: object, *, may_raise: bool = True) -> None:
        """Count a death. After too many, raise EngineError.

        ``may_raise``: False delays the error, because a failed row must be returned first.
        """
        self._deaths += 1
        if may_raise and self._deaths > self._job.run.max_engine_restarts:
            self.ladder.restore()
            self._remember()
            raise EngineError(
                f"the engine died {self._deaths} times without an answer (run.max_engine_restarts); the last time:"
                f" {cause}. All finished rows are on disk: correct the cause, then run the same command again"
            )

    def _make_smaller(self, fault: Fault, *, alone: bool = False) -> None:
        reduction = self.ladder.reduce(self._engine.limits, fault, alone=alone)
        if reduction is not None:
            self._say(f"out of memory ({fault}): next engine with {_shown(reduction)}")

    def _is_restarted(self) -> bool:
        """Restart the engine. In a thread, begin to do so, and return False until it is loaded."""
        if self._thread is None:
            self._restart()
        elif not self._thread.finish(self._restart):
            return False
        self._restart_due = ""
        return True

    def _restart(self) -> None:
        if self._restart_due != _DEATH:
            self._say(f"engine restart: {self._restart_due}")
        self._engine.close()
        while True:
            self.restarts += 1
            self._remember()
            try:
                self._engine = self._open()
                return
            except (StartFailed, JobError) as error:
                # The engine started before, so this may be temporary.
                self._say(f"the next engine did not start: {' '.join(str(error).split())}")
                self._count_death(error)
                if isinstance(error, JobError):  # the engine does not allow the smaller settings
                    self.ladder.restore()
                self._sleep(min(self._deaths, LONGEST_PAUSE_S))

    def _open(self) -> Engine:
        """Open an engine with the options that the ladder has reduced. Reduce them further while memory runs out during
        loading."""
        n_reductions = 0
        while True:
            options = {**self._job.engine.options, **self.ladder.overrides}
            job = self._job.with_keys(engine={"options": options})
            if self._thread is not None:
                self._thread.check_open()
            try:
                engine = self._open_engine(job, self._hear)
            except StartFailed as error:
                if not self._job.run.max_engine_restarts:
                    raise
                fault = self._host_memory.judged(error.fault)
                # A single kill proves nothing; a second one counts as memory.
                if fault.is_unexplained_kill:
                    self._say(f"engine died at load ({fault}): trying once more")
                    continue
                reduction = None
                if fault.kind == "oom":
                    limits = error.limits or {**_UNKNOWN_LIMITS, **options}
                    reduction = self.ladder.reduce(limits, fault)
                if reduction is None:
                    self.ladder.undo(n_reductions)  # these reductions did not help
                    self._remember()
                    raise
                n_reductions += 1
                self._say(f"out of memory at load ({fault}): next try with {_shown(reduction)}")
                self._remember()
            else:
                self._host_memory.begin()
                return engine

    def _remember(self) -> None:
        self._hear(EngineHistory(self.restarts, self.ladder.reductions))

    def _say(self, text: str) -> None:
        self._hear(EngineMessage(text))


def _row_error(fault: Fault) -> RowError:
    if fault.kind == "oom":
        return RowOutOfMemoryError(
            f"the engine runs out of memory even if this row runs alone: {fault}"
        )
    if fault.kind == "timeout":
        return RowTimeoutError(str(fault))
    return EngineCrashError(f"the engine dies even if this row runs alone: {fault}")


def _shown(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in options.items())
