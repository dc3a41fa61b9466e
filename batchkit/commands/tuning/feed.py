"""Feeds an engine for a while as a run would, without a log, and measures the answers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, replace

from batchkit.commands.tuning.rounds import Budget, Round, Rounds, TimedAnswer
from batchkit.config.tables import JobConfig
from batchkit.engines.base import Engine, EngineLoad
from batchkit.execution.attempts import Attempts
from batchkit.execution.feeder import POLL_S, Feeder
from batchkit.execution.window import KV_CACHE_FULL
from batchkit.rendering.prefetch import Prefetch
from batchkit.rendering.renderer import PromptRenderer
from batchkit.sources import read_rows
from batchkit.types import Completion, Request, Usage

_LEAST_IDLE_S = 0.5


@dataclass(frozen=True, slots=True)
class Idle:
    """Shares of the steady time, 0 to 1; ``running`` is how many requests ran at once on average.

    ``rendering``: the engine had free slots, and no rendered row was ready. ``preparing``: it had
    free slots and enough rows, but was still tokenising them or preprocessing their images.
    ``kv_cache``: no free slot, because the KV cache was full.
    """

    rendering: float
    preparing: float
    kv_cache: float
    running: float
    preempted: int


class Feed:
    """Feeds an engine with the rows (all of the job or a sample) and counts, until time or rows end.

    ``failed``: rows by kind of error. ``rounds`` are known at the end.
    """

    def __init__(
        self,
        job: JobConfig,
        engine: Engine,
        renderer: PromptRenderer,
        batch_size: int,
        budget: Budget,
        is_sample: bool,
    ) -> None:
        threads = job.run.render_threads
        self._prefetch = Prefetch(
            read_rows(job.input),
            renderer.render_or_fail,
            threads=threads,
            # Fewer than in a run: many rendered rows would hide for a while that rendering is slow.
            ahead=max(2 * threads, batch_size),
            max_bytes=job.media.max_memory_bytes,
        )
        self._feeder = Feeder(
            job, engine, self._prefetch, Attempts(job.retry, renderer.shortened, None)
        )
        self._is_sample = is_sample
        self._generates = job.task == "generate"
        self._engine = engine
        self._periods = Rounds(batch_size, budget)
        self._budget = budget
        self._to_come_first = batch_size  # rows still to come for a full engine …
        self._first_wave: set[int] = set()  # … and the first rows in flight
        self._began = 0.0
        self.idle = IdleMeter()
        self.answers: list[TimedAnswer] = []
        self.failed: Counter[str] = Counter()
        self.first_error = ""
        self.rounds: list[Round] = []

    def run(self) -> None:
        """Raises:
        EngineError: the engine died.
        InputError: the rows can't be read.
        """
        feeder = self._feeder
        with closing(self._prefetch):
            if self._warms_up():
                self._steps()
            end = self.answers[-1].at if self.answers and feeder.is_done else self._seconds()
            is_whole = feeder.is_done and not self._is_sample
            self.rounds = self._periods.cut(self.answers, end, is_whole=is_whole)

    def _steps(self) -> None:
        feeder = self._feeder
        self._began = last = time.monotonic()
        while not self._periods.is_over(
            last - self._began,
            len(self.answers),
            has_begun=not self._to_come_first and not self._first_wave,
            has_more=feeder.has_more,
        ):
            if self._seconds() < self._budget.most_s:
                self._count(feeder.fill())
            self._watch_first_wave()
            if feeder.is_done:
                break
            load, in_flight = self._engine.load(), len(feeder.in_flight)
            self._count(feeder.poll())
            now = time.monotonic()
            if self._periods.is_steady and feeder.has_more:
                most = self._engine.max_num_seqs
                self.idle.add(now - last, load, in_flight, feeder.window.size, most)
            feeder.window.adapt(load, in_flight)  # as it would in a run
            last = now

    def _warms_up(self) -> bool:
        """Run one step of the first row, because the first step is slow and must not count.
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
        one_step = {"max_tokens": 1} if self._generates else {}
        self._engine.submit(replace(first, sampling={**first.sampling, **one_step}))
        while time.monotonic() < deadline:
            if self._engine.poll(POLL_S):
                return True
        return False

    def _watch_first_wave(self) -> None:
        for request in self._feeder.in_flight.values():
            index = request.row.index
            if self._to_come_first and request.attempt == 1 and index not in self._first_wave:
                self._to_come_first -= 1
                self._first_wave.add(index)

    def _count(self, settled: Iterable[Completion]) -> None:
        for completion in settled:
            self._first_wave.discard(completion.request.row.index)
            if completion.error is not None:
                kind = completion.error.kind
                self.failed[kind] += 1
                self.first_error = self.first_error or f"{kind}: {completion.error}"
                continue
            usage = completion.usage or Usage(0, 0)
            self.answers.append(
                TimedAnswer(
                    self._seconds(),
                    completion.latency_s,
                    usage.prompt_tokens,
                    usage.completion_tokens,
                )
            )

    def _seconds(self) -> float:
        return time.monotonic() - self._began


class IdleMeter:
    """Adds up time by what the engine is waiting for."""

    def __init__(self) -> None:
        self._total_s = self._rendering_s = self._preparing_s = self._kv_cache_s = 0.0
        self._running = 0.0
        self._preempted = 0

    def add(self, seconds: float, load: EngineLoad, in_flight: int, window: int, most: int) -> None:
        """Add ``seconds`` with ``in_flight`` requests in an engine that runs ``most`` at once: all
        that were rendered and fit into ``window``. ``load`` is the engine's last report."""
        self._total_s += seconds
        self._running += seconds * load.running
        self._preempted += load.preempted
        if load.kv_cache_usage >= KV_CACHE_FULL:
            self._kv_cache_s += seconds
        elif window <= most:  # it never has a queue, and rarely reports how many run
            self._rendering_s += seconds * (in_flight < window)
        elif load.waiting == 0 and load.running < most:
            if in_flight < window:
                self._rendering_s += seconds
            else:
                self._preparing_s += seconds

    def read(self) -> Idle | None:
        """None if the steady time was too short to judge."""
        if self._total_s < _LEAST_IDLE_S:
            return None
        return Idle(
            self._rendering_s / self._total_s,
            self._preparing_s / self._total_s,
            self._kv_cache_s / self._total_s,
            self._running / self._total_s,
            self._preempted,
        )
