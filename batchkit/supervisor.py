"""Keeps an engine going: restarts it when it dies, smaller when memory ran out, and finds the row
that kills it.

It is an Engine itself, so the processor's loop knows nothing of deaths: what it submits comes back
exactly once, a poison row with its error. After a death the requests that were in flight are
replayed in halves (``suspects.py``); new ones are held until all of them are cleared. When memory
ran out, the next engine takes one step down the ladder (``ladder.py``); if a poison row turns out to
be the cause, the steps that it cost are taken back.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from batchkit.config import JobConfig
from batchkit.engines import open_engine
from batchkit.engines.base import Engine, EngineLoad
from batchkit.errors import EngineCrashError, EngineError, RowError, RowOutOfMemoryError
from batchkit.faults import EngineDied, Fault, StartFailed
from batchkit.ladder import Ladder
from batchkit.suspects import Suspects
from batchkit.types import Completion, Request

Say = Callable[[str], None]

GROWTH_SHARE = 0.05
"""At most this share of the time goes into restarts that only try a larger setting."""
_GROWTH = "a stretch of success"
_UNKNOWN_LIMITS = {"max_num_seqs": 256}  # vLLM's default, for an engine that died before it told


class SupervisedEngine:
    """``say`` gets one line per event, ``note`` what is too long for that.

    ``restarts`` counts engines after the first. ``remember`` is called with that count and the
    ladder's steps whenever either changes, before the next engine is opened.

    Raises:
        JobError: the engine's options can't be right.
        EngineError: it could not start, or died ``run.max_engine_restarts`` times without an answer.
    """

    def __init__(
        self,
        job: JobConfig,
        say: Say,
        *,
        note: Say = lambda text: None,
        remember: Callable[[int, Sequence[Mapping[str, Any]]], None] = lambda restarts, steps: None,
        ladder: Ladder | None = None,
        open_engine: Callable[[JobConfig], Engine] = open_engine,
    ) -> None:
        self._job = job
        self._say = say
        self._note = note
        self._remember = remember
        self._open_engine = open_engine
        self.ladder = ladder or Ladder()
        self._suspects = Suspects()
        self._convicted: set[int] = set()
        self._in_flight: dict[int, Request] = {}
        self._held: deque[Request] = deque()
        self._answered: Request | None = None
        self._canary: Request | None = None
        self._deaths = 0
        self._planned = ""
        self._host_gb_at_start: float | None = None
        self.restarts = 0
        self._engine = self._open()
        self._safe_steps = list(self.ladder.steps)

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
        if request.row.index in self._convicted:
            self._suspects.suspect(request)
        elif self._suspects or self._planned or self._held:
            self._held.append(request)
        else:
            self._hand_over(request)

    def poll(self, timeout_s: float) -> Sequence[Completion]:
        if not self._in_flight:
            self._go_on()
        try:
            done = self._engine.poll(timeout_s)
        except EngineDied as death:
            return self._recover(death)
        for completion in done:
            del self._in_flight[id(completion.request)]
        self._count_success(done)
        return [completion for completion in done if completion.request is not self._canary]

    def load(self) -> EngineLoad:
        """As the engine's; what is held back here waits, too."""
        load = self._engine.load()
        self._watch_memory(load.host_bytes / 2**30)
        return load._replace(waiting=load.waiting + len(self._held) + len(self._suspects))

    def close(self) -> None:
        self._engine.close()

    def _hand_over(self, request: Request) -> None:
        self._in_flight[id(request)] = request
        self._engine.submit(request)

    def _go_on(self) -> None:
        """Nothing is in flight: restart if that was planned, then the next suspects, or what is held."""
        if self._planned:
            if self._planned == _GROWTH:
                self.ladder.step_up()
                self._planned += f", one step up to {self._setting()}"
            self._say(f"engine restart: {self._planned}")
            self._planned = ""
            self._restart()
        if self._suspects and self._deaths > self._job.run.max_engine_restarts // 2:
            self._prove_sound()
        for request in self._suspects.next_group():
            self._hand_over(request)
        while not self._suspects and self._held:
            self._hand_over(self._held.popleft())

    def _prove_sound(self) -> None:
        """Before a search is given up as hopeless, run a row that is under no suspicion.

        A new one if one is held, else the last answered one, whose second answer goes nowhere.
        """
        if self._held:
            self._suspects.interpose([self._held.popleft()])
        elif self._answered is not None:
            self._canary = replace(self._answered)
            self._suspects.interpose([self._canary])

    def _count_success(self, done: Sequence[Completion]) -> None:
        answered = [completion.request for completion in done if completion.error is None]
        if not answered:
            return
        self._answered = answered[-1]
        self._deaths = 0
        if self._suspects:
            return
        self._safe_steps = list(self.ladder.steps)
        may_grow = (time.monotonic() - self._opened_at) * GROWTH_SHARE >= self._open_s
        if self.ladder.succeeded(len(answered)) and may_grow and not self._planned:
            self._planned = _GROWTH

    def _watch_memory(self, host_gb: float) -> None:
        """Plan a restart where the engine's process grew too large; a new one must be smaller."""
        limit_gb = self._job.run.max_host_gb
        if limit_gb is None or not host_gb or self._planned:
            return
        told = f"{host_gb:.1f} GiB (run.max_host_gb = {limit_gb:g})"
        if self._host_gb_at_start is None:
            self._host_gb_at_start = host_gb
            if host_gb > limit_gb:
                self._say(f"a new engine already holds {told}: no restart would help")
        elif host_gb > limit_gb >= self._host_gb_at_start:
            self._planned = f"its process holds {told}"

    def _recover(self, death: EngineDied) -> list[Completion]:
        """The engine is dead. The poison row comes back failed, if this death gave it away."""
        fault = death.fault
        in_flight = [r for r in self._in_flight.values() if r is not self._canary]
        self._in_flight.clear()
        self._planned = ""
        self._deaths += 1
        rows = "1 row" if len(in_flight) == 1 else f"{len(in_flight)} rows"
        self._say(f"engine died ({fault.kind}) with {rows} in flight: {fault}")
        if death.stacks:
            self._note(death.stacks)
        if self._deaths > self._job.run.max_engine_restarts:
            raise EngineError(
                f"the engine died {self._deaths} times without one answer"
                f" (run.max_engine_restarts); last: {fault}"
            )
        poison = self._suspects.died(in_flight)
        if fault.kind == "oom":
            self._make_smaller(fault, unless=poison)
        self._restart()
        if poison is None:
            return []
        self._convicted.add(poison.row.index)
        self._say(f"row {poison.row.index} (id {poison.row.id}) alone kills the engine: failed")
        return [Completion(poison, error=_row_error(fault))]

    def _make_smaller(self, fault: Fault, unless: Request | None) -> None:
        """A row that runs out of memory alone says nothing about the batch."""
        if unless is not None:
            self.ladder.steps = list(self._safe_steps)
        elif step := self.ladder.step_down(self._engine.limits, fault):
            self._say(f"out of memory ({fault}): next engine with {_shown(step)}")

    def _restart(self) -> None:
        self._engine.close()
        self.restarts += 1
        self._remember(self.restarts, self.ladder.steps)
        self._engine = self._open()

    def _open(self) -> Engine:
        """An engine with the ladder's settings; where memory runs out at load, smaller still."""
        while True:
            started = time.monotonic()
            options = {**self._job.engine.options, **self.ladder.overrides}
            try:
                engine = self._open_engine(
                    self._job.model_copy(
                        update={"engine": self._job.engine.model_copy(update={"options": options})}
                    )
                )
            except StartFailed as error:
                step = None
                if error.fault.kind == "oom":
                    limits = error.limits or {**_UNKNOWN_LIMITS, **options}
                    step = self.ladder.step_down(limits, error.fault)
                if step is None:
                    raise
                self._say(f"out of memory at load ({error.fault}): next try with {_shown(step)}")
                self._remember(self.restarts, self.ladder.steps)
            else:
                self._opened_at = time.monotonic()
                self._open_s = self._opened_at - started
                self._host_gb_at_start = None
                return engine

    def _setting(self) -> str:
        return _shown(self.ladder.overrides) if self.ladder.steps else "the job's own settings"


def _row_error(fault: Fault) -> RowError:
    if fault.kind == "oom":
        return RowOutOfMemoryError(f"the engine runs out of memory on this row alone: {fault}")
    return EngineCrashError(f"the engine dies on this row alone: {fault}")


def _shown(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in options.items())
