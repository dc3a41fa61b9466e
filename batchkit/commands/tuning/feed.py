"""Feeds an engine for a while as a run would, without a log, and measures the answers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from typing import NamedTuple

from batchkit.commands.tuning.idle import Idle, IdleMeter
from batchkit.commands.tuning.rounds import Budget, Round, Rounds, TimedAnswer
from batchkit.config.tables import JobConfig
from batchkit.engines.base import Engine
from batchkit.execution.attempts import Attempts
from batchkit.execution.feeder import POLL_S, Feeder
from batchkit.rendering.prefetch import Prefetch
from batchkit.rendering.renderer import PromptRenderer
from batchkit.sources import read_rows
from batchkit.types import Completion, Request, Usage


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
        feeder = Feeder(job, engine, prefetch, Attempts(job.retry, renderer, None))
        return _Feed(engine, feeder, batch_size, budget, is_sample=is_sample).run()


class _Feed:
    """Feeds the engine and counts, until time or rows end."""

    def __init__(
        self,
        engine: Engine,
        feeder: Feeder,
        batch_size: int,
        budget: Budget,
        *,
        is_sample: bool,
    ) -> None:
        self._is_sample = is_sample
        self._engine = engine
        self._feeder = feeder
        self._rounds = Rounds(batch_size, budget)
        self._budget = budget
        self._to_come_first = batch_size  # rows still to come for a full engine …
        self._first_wave: set[int] = set()  # … and the first rows in flight
        self._idle = IdleMeter()
        self._answers: list[TimedAnswer] = []
        self._failed: Counter[str] = Counter()
        self._first_error = ""
        self._began = 0.0

    def run(self) -> Fed:
        feeder = self._feeder
        if self._warms_up():
            self._began = last = time.monotonic()
            while self._goes_on(last - self._began):
                if self._seconds() < self._budget.most_s:
                    self._count(feeder.fill())
                self._watch_first_wave()
                if feeder.is_done:
                    break
                load, in_flight = self._engine.load(), len(feeder.in_flight)
                self._count(feeder.poll())
                now = time.monotonic()
                if self._rounds.is_steady and feeder.has_more:
                    most = self._engine.max_num_seqs
                    self._idle.add(now - last, load, in_flight, feeder.window.size, most)
                feeder.window.adapt(load, in_flight)  # as it would in a run
                last = now
        end = self._answers[-1].at if self._answers and feeder.is_done else self._seconds()
        is_whole = feeder.is_done and not self._is_sample
        rounds = self._rounds.cut(self._answers, end, is_whole=is_whole)
        answered = len(self._answers)
        return Fed(rounds, answered, self._failed, self._first_error, self._idle.read())

    def _warms_up(self) -> bool:
        """Generate one token of the first row, because the first step is slow and must not count.
        False if this used up the time."""
        first: Request | None = None
        deadline = time.monotonic() + self._budget.seconds
        while first is None and not self._feeder.is_done and time.monotonic() < deadline:
            rendered = self._feeder.next_rendered()
            if isinstance(rendered, Completion):
                self._count(self._feeder.settle(rendered))
            else:
                first = rendered
        if first is None:
            return True
        self._feeder.put_back(first)
        self._engine.submit(replace(first, sampling={**first.sampling, "max_tokens": 1}))
        while time.monotonic() < deadline:
            if self._engine.poll(POLL_S):
                return True
        return False

    def _goes_on(self, now: float) -> bool:
        has_begun = not self._to_come_first and not self._first_wave
        return not self._rounds.is_over(
            now, len(self._answers), has_begun=has_begun, has_more=self._feeder.has_more
        )

    def _watch_first_wave(self) -> None:
        for index, request in self._feeder.in_flight.items():
            if self._to_come_first and request.attempt == 1 and index not in self._first_wave:
                self._to_come_first -= 1
                self._first_wave.add(index)

    def _count(self, settled: Iterable[Completion]) -> None:
        for completion in settled:
            self._first_wave.discard(completion.request.row.index)
            if completion.error is not None:
                kind = completion.error.kind
                self._failed[kind] += 1
                self._first_error = self._first_error or f"{kind}: {completion.error}"
                continue
            usage = completion.usage or Usage(0, 0)
            self._answers.append(
                TimedAnswer(
                    self._seconds(),
                    completion.latency_s,
                    usage.prompt_tokens,
                    usage.completion_tokens,
                )
            )

    def _seconds(self) -> float:
        return time.monotonic() - self._began
