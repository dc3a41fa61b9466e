"""Keeps an engine going: restarts it when it dies, smaller when memory ran out, and finds the row
that kills it.

It is an Engine itself, so the processor's loop knows nothing of deaths: what it submits comes back
exactly once, a poison row with its error. After a death the requests that were in flight are
replayed in halves (``suspects.py``); new ones are held until all of them are cleared. When memory
ran out, the next engine takes one step down the ladder (``ladder.py``); if a poison row turns out to
be the cause, the steps that it cost are taken back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from batchkit.config import JobConfig
from batchkit.engines import open_engine
from batchkit.engines.base import Engine, EngineLoad
from batchkit.errors import EngineCrashError, EngineError, RowError, RowOutOfMemoryError
from batchkit.faults import EngineDied, Fault, fault_of
from batchkit.ladder import Ladder
from batchkit.suspects import Suspects
from batchkit.types import Completion, Request

Say = Callable[[str], None]


class SupervisedEngine:
    """``say`` gets one line per event. ``restarts`` counts engines after the first.

    Raises:
        JobError: the engine's options can't be right.
        EngineError: it could not start, or died ``run.max_engine_restarts`` times without an answer.
    """

    def __init__(
        self,
        job: JobConfig,
        say: Say,
        *,
        ladder: Ladder | None = None,
        open_engine: Callable[[JobConfig], Engine] = open_engine,
    ) -> None:
        self._job = job
        self._say = say
        self._open_engine = open_engine
        self.ladder = ladder or Ladder()
        self._suspects = Suspects()
        self._steps_before = list(self.ladder.steps)
        self._in_flight: dict[int, Request] = {}
        self._held: deque[Request] = deque()
        self._deaths = 0
        self._planned = ""
        self.restarts = 0
        self._engine = self._open()

    @property
    def max_num_seqs(self) -> int:
        return self._engine.max_num_seqs

    @property
    def versions(self) -> Mapping[str, str]:
        return self._engine.versions

    def submit(self, request: Request) -> None:
        if self._suspects or self._planned:
            self._held.append(request)
        else:
            self._hand_over(request)

    def poll(self, timeout_s: float) -> Sequence[Completion]:
        if not self._in_flight:
            self._go_on()
        try:
            done = self._engine.poll(timeout_s)
        except EngineError as error:
            return self._recover(error.fault if isinstance(error, EngineDied) else fault_of(error))
        for completion in done:
            del self._in_flight[id(completion.request)]
        self._count_success(done)
        return done

    def load(self) -> EngineLoad:
        return self._engine.load()

    def close(self) -> None:
        self._engine.close()

    def _hand_over(self, request: Request) -> None:
        self._in_flight[id(request)] = request
        self._engine.submit(request)

    def _go_on(self) -> None:
        """Nothing is in flight: restart if that was planned, then the next suspects, or what is held."""
        if self._planned:
            self._say(f"engine restart: {self._planned}")
            self._planned = ""
            self._restart()
        group = self._suspects.next_group() if self._suspects else []
        while not self._suspects and self._held:
            self._hand_over(self._held.popleft())
        for request in group:
            self._hand_over(request)

    def _count_success(self, done: Sequence[Completion]) -> None:
        answered = sum(completion.error is None for completion in done)
        if not answered:
            return
        self._deaths = 0
        if self.ladder.succeeded(answered) and not self._suspects and not self._planned:
            self.ladder.step_up()
            self._planned = f"a stretch of success, one step up to {self._setting()}"
        limit_gb = self._job.run.max_host_gb
        used_gb = getattr(self._engine, "rss_bytes", 0) / 2**30
        if limit_gb is not None and used_gb > limit_gb and not self._planned:
            self._planned = f"its process holds {used_gb:.1f} GiB (run.max_host_gb = {limit_gb:g})"

    def _recover(self, fault: Fault) -> list[Completion]:
        """The engine is dead. The poison row comes back failed, if this death gave it away."""
        in_flight = list(self._in_flight.values())
        self._in_flight.clear()
        self._planned = ""
        self._deaths += 1
        if not self._suspects:
            self._steps_before = list(self.ladder.steps)
        self._say(f"engine died ({fault.kind}) with {len(in_flight)} rows in flight: {fault}")
        poison = self._suspects.died(in_flight)
        if self._deaths > self._job.run.max_engine_restarts:
            raise EngineError(
                f"the engine died {self._deaths} times without one answer"
                f" (run.max_engine_restarts); last: {fault}"
            )
        if poison is not None:
            self.ladder.steps = list(self._steps_before)
        elif fault.kind == "oom":
            self._step_down()
        self._restart()
        if poison is None:
            return []
        self._say(f"row {poison.row.index} (id {poison.row.id}) alone kills the engine: failed")
        return [Completion(poison, error=_row_error(fault))]

    def _step_down(self) -> None:
        options = {**self._job.engine.options, **self.ladder.overrides}
        step = self.ladder.step_down(options, self._engine.max_num_seqs)
        if step is not None:
            self._say(f"out of memory: next engine with {_shown(step)}")

    def _restart(self) -> None:
        self._engine.close()
        self.restarts += 1
        self._engine = self._open()

    def _open(self) -> Engine:
        """An engine with the ladder's settings; where memory runs out at load, smaller still."""
        while True:
            engine = self._job.engine
            options = {**engine.options, **self.ladder.overrides}
            try:
                return self._open_engine(
                    self._job.model_copy(
                        update={"engine": engine.model_copy(update={"options": options})}
                    )
                )
            except EngineError as error:
                fault = error.fault if isinstance(error, EngineDied) else fault_of(error)
                step = None
                if fault.kind == "oom":
                    step = self.ladder.step_down(options, options.get("max_num_seqs", 256))
                if step is None:
                    raise
                self._say(f"out of memory at load ({fault}): next try with {_shown(step)}")

    def _setting(self) -> str:
        return _shown(self.ladder.overrides) if self.ladder.steps else "the job's own settings"


def _row_error(fault: Fault) -> RowError:
    if fault.kind == "oom":
        return RowOutOfMemoryError(f"the engine runs out of memory on this row alone: {fault}")
    return EngineCrashError(f"the engine dies on this row alone: {fault}")


def _shown(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in options.items())
