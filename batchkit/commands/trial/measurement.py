"""Measurements of a trial: rates and latencies while the engine was full.

A new engine answers short rows first, and an engine that runs out of rows is half empty; in a long job, both phases
hardly matter. So the measured period begins when nine in ten of the first rows (those that fill the engine) have
been answered. It ends when fewer rows are left than run concurrently. If this period is too short (few rows or
little time), or if the trial has answered every row of the job, the whole trial is measured.

Why nine in ten of the first rows, instead of the same number of any rows: with lengths from 6 to 96 tokens and 64
concurrent requests, the latter gave 0.7 of the tokens per second of a long run. Waiting for the last of a thousand
lognormal answers takes three to six times as long as for nine in ten, whose rate is within 3 % of a long run's
(simulated).
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from batchkit.execution.window import KV_CACHE_FULL
from batchkit.storage.lines import Generation, tokens_in
from batchkit.storage.log import read_lines
from batchkit.storage.metrics import Metrics
from batchkit.types import Record

ENOUGH_S, ENOUGH_ROWS, ENOUGH_WAVES = 5.0, 32, 4
_LEAST_ROWS, _LEAST_STEADY_S = 4, 0.5
_STILL_FIRST = 10  # a full engine may still run one in ten of the first rows
_LEAST_S_BEHIND = 1.0
_WINDOWS, _T_90 = 10, 1.833  # Student's t for 9 degrees of freedom, two-sided 90 %
_CLOCK_S = 0.001  # resolution of the times in records


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """The times and token counts of a row or of one of its generations.

    - ``began``, ``ended``: seconds since 1970. ``began`` is when the request entered the engine's queue.
    - ``prompt_tokens``, ``completion_tokens``: sums over all attempts.
    - ``last_tokens``: the completion tokens of the last attempt alone.
    - ``kind``: the kind of failure; "" for an answer.
    """

    index: int
    began: float
    ended: float
    prompt_tokens: int
    completion_tokens: int
    last_tokens: int
    kind: str = ""
    message: str = ""

    @property
    def latency_s(self) -> float:
        return self.ended - self.began


def answers_in(log: Path, offset: int = 0) -> Iterator[tuple[TimedAnswer, int]]:
    """Yield each record of the log after the byte ``offset`` as a TimedAnswer, with the byte at which the record ends.
    A record that is not complete yet is left out."""
    for line in read_lines(log, offset):
        if line.record is not None:
            yield answer_of(line.record), line.end


def answer_of(record: Record | Generation) -> TimedAnswer:
    ended, error = seconds_at(record.finished_at), record.error
    return TimedAnswer(
        record.index,
        ended - record.latency_s,
        ended,
        *tokens_in(record),
        0 if record.usage is None else record.usage.completion_tokens,
        "" if error is None else error.kind,
        "" if error is None else error.message,
    )


def seconds_at(time: str) -> float:
    """Convert a time in a record or in the metrics to seconds since 1970."""
    return datetime.fromisoformat(time).timestamp()


@dataclass(frozen=True, slots=True)
class Figures:
    """The numbers of a measured period. ``interval``: 90 % interval of the rate in rows per second, from the rates in
    ten windows (Student's t). ``is_typical``: the numbers hold for the whole job, because the engine was always full,
    or because this was the whole job."""

    seconds: float
    rows: int
    prompt_tokens: int
    completion_tokens: int
    p50_ms: float
    p99_ms: float
    is_typical: bool
    interval: tuple[float, float] = (0.0, math.inf)

    @classmethod
    def of(cls, answers: Sequence[TimedAnswer], seconds: float, *, is_typical: bool) -> Figures:
        latencies = sorted(answer.latency_s for answer in answers)
        return cls(
            seconds=max(seconds, _CLOCK_S),
            rows=len(answers),
            prompt_tokens=sum(answer.prompt_tokens for answer in answers),
            completion_tokens=sum(answer.completion_tokens for answer in answers),
            p50_ms=1000 * _percentile(latencies, 0.50),
            p99_ms=1000 * _percentile(latencies, 0.99),
            is_typical=is_typical,
            interval=_interval([answer.ended for answer in answers], max(seconds, _CLOCK_S)),
        )

    @property
    def rows_per_s(self) -> float:
        return self.rows / self.seconds

    @property
    def prompt_tokens_per_s(self) -> float:
        return self.prompt_tokens / self.seconds

    @property
    def completion_tokens_per_s(self) -> float:
        return self.completion_tokens / self.seconds


class Measurement:
    """The answers of a running trial, and the decision when it may stop.

    The trial runs ``at_once`` of its ``total`` rows at a time. It may take ``seconds`` to fill the engine, and
    ``seconds`` more with the engine full. With the engine full, it stops earlier if

    - 5 s have passed and N = max(32, 4 × ``at_once``) rows were answered, or
    - 1 s has passed, N / 2 rows were answered, and the confidence interval of the rate is wholly below ``least`` rows
      per second.

    ``first``: indexes of the rows that are submitted first. The engine counts as full once nearly all of them have
    finished.
    """

    def __init__(
        self,
        at_once: int,
        seconds: float,
        *,
        total: int,
        first: Collection[int],
        least: float = 0.0,
    ) -> None:
        self.at_once, self.seconds = at_once, seconds
        self._left, self._least = total, least
        self._first = set(first)
        self.full: list[TimedAnswer] = []
        """Answers received while the engine was full, after the answer at which it became full."""
        self.answers: list[TimedAnswer] = []
        self.failed = Counter[str]()
        self.first_error = ""

    def add(self, answer: TimedAnswer) -> None:
        """Add a finished row. Rows are added in the order in which they finished."""
        self._left -= 1
        self._first.discard(answer.index)
        if answer.kind:
            self.failed[answer.kind] += 1
            self.first_error = self.first_error or f"{answer.kind}: {answer.message}"
        else:
            self.answers.append(answer)
        is_full = self._left >= self.at_once and len(self._first) <= self.at_once // _STILL_FIRST
        if is_full and not (answer.kind and self.full):
            self.full.append(answer)

    @property
    def has_more(self) -> bool:
        return self._left > 0

    @property
    def full_s(self) -> float:
        return self.full[-1].ended - self.full[0].ended if self.full else 0.0

    def is_over(self, began: float, now: float) -> bool:
        """Return True if the trial may stop at the time ``now``. ``began``: the time at which the engine was loaded."""
        if not self.full:
            return now >= began + self.seconds
        enough = max(ENOUGH_ROWS, ENOUGH_WAVES * self.at_once)
        is_enough = self.full_s >= ENOUGH_S and len(self.full) > enough
        return is_enough or now >= self.full[0].ended + self.seconds or self._is_behind(enough)

    def _is_behind(self, enough: int) -> bool:
        n_rows, seconds = len(self.full) - 1, self.full_s
        if seconds < _LEAST_S_BEHIND or n_rows < enough / 2 or n_rows >= self._least * seconds:
            return False  # too early to tell, or not slower than ``least``
        return _interval([answer.ended for answer in self.full[1:]], seconds)[1] < self._least

    def figures(self, ended: float, *, is_sample: bool) -> Figures | None:
        """Return the numbers of a trial that ended at the time ``ended``, or None if no row was answered.
        ``is_sample``: the job has more rows than the trial, so the rate over all rows of the trial is not that of the
        job."""
        answers = self.answers
        if not answers:
            return None
        is_whole = not self._left and not is_sample
        if len(self.full) > max(_LEAST_ROWS, self.at_once) and not is_whole:
            return Figures.of(self.full[1:], self.full_s, is_typical=True)
        end = ended if self._left else answers[-1].ended
        began = min(answer.began for answer in answers)
        return Figures.of(answers, end - began, is_typical=is_whole)


def was_short(
    measurement: Measurement, figures: Figures | None, metrics: Sequence[Metrics]
) -> bool:
    """Return True if time ran out before the engine was full. If no row was answered, return True if the engine
    generated tokens."""
    if figures is None:
        return not measurement.failed and any(_generated(line) for line in metrics)
    return measurement.has_more and not figures.is_typical


def hung_s(measurement: Measurement, metrics: Sequence[Metrics]) -> float:
    """Return the seconds for which the engine had generated nothing when the trial ended, if that is long enough to say
    that it hung. Otherwise return 0. Long enough means more than half of ``measurement.seconds`` and more than twice
    the slowest answer."""
    if not measurement.answers or not metrics or not metrics[-1].in_flight:
        return 0.0
    last = metrics[-1]
    moved = next(line.at for line in metrics if _generated(line) == _generated(last))
    silent_s = seconds_at(last.at) - max(seconds_at(moved), measurement.answers[-1].ended)
    longest = max(answer.latency_s for answer in measurement.answers)
    return silent_s if silent_s > max(2 * longest, measurement.seconds / 2) else 0.0


def _generated(line: Metrics) -> int:
    return line.completion_tokens + line.unfinished_tokens + line.rows_ok


class Idle(NamedTuple):
    """Why the engine was not busier while it was full. ``rendering``: fraction of slots that were empty because no
    rendered row was ready. ``preparing``: fraction of slots that were empty while rows were tokenized or their images
    preprocessed. ``kv_cache``: fraction of the time with a full KV cache. ``running``: average number of concurrent
    requests. ``preempted``: number of preemptions."""

    rendering: float
    preparing: float
    kv_cache: float
    running: float
    preempted: int


def idle_of(measurement: Measurement, metrics: Sequence[Metrics]) -> Idle | None:
    """Return why slots of the engine were empty, or None if it was full for too short a time to judge."""
    full, places = measurement.full, measurement.at_once
    if measurement.full_s < _LEAST_STEADY_S:
        return None
    lines = [line for line in metrics if full[0].ended <= seconds_at(line.at) <= full[-1].ended]
    if not lines:
        return None
    # By Little's law: requests queued or running. The other requests in flight are still being prepared.
    held = sum(answer.latency_s for answer in full[1:]) / measurement.full_s
    preparing = sum(line.in_flight for line in lines) / len(lines) - held
    empty = max(0.0, places - held)
    preparing = min(empty, max(0.0, preparing))
    return Idle(
        rendering=(empty - preparing) / places,
        preparing=preparing / places,
        kv_cache=sum(line.kv_cache_usage >= KV_CACHE_FULL for line in lines) / len(lines),
        running=sum(line.running for line in lines) / len(lines),
        preempted=lines[-1].preemptions - lines[0].preemptions,
    )


def _interval(ended: Sequence[float], seconds: float) -> tuple[float, float]:
    """Return the 90 % interval of the rate, in rows per second, of rows that finished at the times ``ended``.
    ``seconds``: the length of the period."""
    rate, last = len(ended) / seconds, max(ended)
    counts = Counter(min(_WINDOWS - 1, int((last - end) / seconds * _WINDOWS)) for end in ended)
    rates = [counts[n] * _WINDOWS / seconds for n in range(_WINDOWS)]
    half = _T_90 * statistics.stdev(rates) / math.sqrt(_WINDOWS)
    return max(0.0, rate - half), rate + half


def _percentile(ordered: Sequence[float], share: float) -> float:
    """Return the percentile ``share`` (0 to 1) of the sorted values, by nearest rank."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
