"""Feeds an engine for a while as a run would, without a log, and measures the answers."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from typing import NamedTuple

from batchkit.commands.tuning.idle import Idle, IdleMeter
from batchkit.commands.tuning.rounds import Budget, Round, Rounds, TimedAnswer
from batchkit.config.tables import JobConfig
from batchkit.engines.base import Engine
from batchkit.execution.attempts import Attempts
from batchkit.execution.records import failed_unless_whole
from batchkit.execution.window import Window
from batchkit.rendering.prefetch import Prefetch
from batchkit.rendering.renderer import PromptRenderer
from batchkit.sources import read_rows
from batchkit.types import Completion, Request, Row

POLL_S = 0.05


class Fed(NamedTuple):
    """The result. ``failed``: rows by kind of error; ``error`` is the first message."""

    rounds: list[Round]
    answered: int
    failed: Counter[str]
    error: str
    idle: Idle | None


def feed(
    job: JobConfig,
    engine: Engine,
    renderer: PromptRenderer,
    batch_size: int,
    budget: Budget,
    *,
    is_sample: bool,
) -> Fed:
    """Feed the engine until the budget is used or the rows (all of them or a sample) end.

    Raises:
        EngineError: the engine died.
        InputError: the rows can't be read.
    """
    threads = job.run.render_threads
    prefetch = Prefetch(
        read_rows(job.input),
        renderer.render_or_fail,
        threads=threads,
        # Fewer than in a run: many rendered rows would hide for a while that rendering is too slow.
        ahead=max(2 * threads, batch_size),
        max_bytes=job.media.max_memory_bytes,
    )
    with closing(prefetch):
        return _Feed(job, engine, renderer, prefetch, batch_size, budget, is_sample=is_sample).run()


class _Feed:
    """The processor's loop without a log: fill the window, poll, count, until time or rows end."""

    def __init__(
        self,
        job: JobConfig,
        engine: Engine,
        renderer: PromptRenderer,
        prefetch: Prefetch[Row, Request | Completion],
        batch_size: int,
        budget: Budget,
        *,
        is_sample: bool,
    ) -> None:
        self._is_sample = is_sample
        fixed = job.run.max_in_flight
        self._engine = engine
        self._prefetch = prefetch
        self._window = Window(engine.max_num_seqs, fixed=None if fixed == "auto" else fixed)
        self._again = Attempts(job.retry, renderer, None)
        self._rounds = Rounds(batch_size, budget)
        self._budget = budget
        self._to_come_first = batch_size  # rows still to come for a full engine …
        self._first_wave: set[int] = set()  # … and the first rows in flight
        self._idle = IdleMeter()
        self._answers: list[TimedAnswer] = []
        self._failed: Counter[str] = Counter()
        self._first_error = ""
        self._first: list[Request] = []
        self._in_flight = 0
        self._began = 0.0

    def run(self) -> Fed:
        if self._warms_up():
            self._began = last = time.monotonic()
            while self._goes_on(last - self._began):
                self._fill()
                if not self._in_flight and not self._again and self._prefetch.exhausted:
                    break
                load, in_flight = self._engine.load(), self._in_flight
                self._poll()
                now = time.monotonic()
                if self._rounds.is_steady and not self._prefetch.exhausted:
                    most = self._engine.max_num_seqs
                    self._idle.add(now - last, load, in_flight, self._window.size, most)
                self._window.adapt(load, in_flight)  # as it would in a run
                last = now
        has_ended = not self._in_flight and not self._again and self._prefetch.exhausted
        end = self._answers[-1].at if self._answers and has_ended else self._seconds()
        is_whole = has_ended and not self._is_sample
        rounds = self._rounds.cut(self._answers, end, is_whole=is_whole)
        answered = len(self._answers)
        return Fed(rounds, answered, self._failed, self._first_error, self._idle.read())

    def _warms_up(self) -> bool:
        """Generate one token of the first row, because the first step is slow and must not count.
        False if this used up the time."""
        deadline = time.monotonic() + self._budget.seconds
        while not self._first and not self._prefetch.exhausted and time.monotonic() < deadline:
            rendered = self._prefetch.get(timeout_s=POLL_S)
            if isinstance(rendered, Completion):
                self._settle(rendered)
            elif rendered is not None:
                self._first.append(rendered)
        is_warm = not self._first
        for request in self._first:
            self._engine.submit(replace(request, sampling={**request.sampling, "max_tokens": 1}))
        while not is_warm and time.monotonic() < deadline:
            is_warm = bool(self._engine.poll(POLL_S))
        return is_warm

    def _goes_on(self, now: float) -> bool:
        has_more = not self._prefetch.exhausted or bool(self._again)
        has_begun = not self._to_come_first and not self._first_wave
        rows = len(self._answers)
        return not self._rounds.is_over(now, rows, has_begun=has_begun, has_more=has_more)

    def _fill(self) -> None:
        while self._in_flight < self._window.size and self._seconds() < self._budget.most_s:
            rendered = self._next()
            if rendered is None:
                return
            if isinstance(rendered, Completion):
                self._settle(rendered)
                continue
            self._engine.submit(rendered)
            self._in_flight += 1
            if self._to_come_first and rendered.attempt == 1:
                self._to_come_first -= 1
                self._first_wave.add(rendered.row.index)

    def _next(self) -> Request | Completion | None:
        if self._first:
            return self._first.pop()
        wait_s = 0 if self._in_flight else POLL_S
        return self._again.pop_due() or self._prefetch.get(timeout_s=wait_s)

    def _poll(self) -> None:
        if not self._in_flight:
            time.sleep(POLL_S if self._again else 0)
            return
        for completion in self._engine.poll(POLL_S):
            self._in_flight -= 1
            self._settle(completion)

    def _settle(self, completion: Completion) -> None:
        settled = self._again.settle(failed_unless_whole(completion))
        if settled is None:
            return
        self._prefetch.release(settled.request)
        self._first_wave.discard(settled.request.row.index)
        if settled.error is not None:
            self._failed[settled.error.kind] += 1
            self._first_error = self._first_error or f"{settled.error.kind}: {settled.error}"
            return
        usage = settled.usage
        self._answers.append(
            TimedAnswer(
                self._seconds(),
                settled.latency_s,
                0 if usage is None else usage.prompt_tokens,
                0 if usage is None else usage.completion_tokens,
            )
        )

    def _seconds(self) -> float:
        return time.monotonic() - self._began
