"""What is measured of a trial: rates and latencies while the engine was kept full.

An engine that has just started answers short rows first, and one that runs out of rows is half
empty; a job of many rows has little of either. So the measured period begins when nine in ten of the rows
that were submitted first, as many as run at once, are answered, and ends when fewer rows than that are left.
(If it began when merely that many rows were answered, with lengths from 6 to 96 tokens and 64 at once, the
answers had 0.7 of the tokens a second that they have in a long run. The last of a thousand lognormal answers
takes three to six times as long as nine in ten, whose rate is within 3 % of a long run's: simulated.) If that
leaves too little, because there are few rows or little time, the whole trial is measured; and so it is if it
has answered every row of the job.
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
_STILL_FIRST = 10  # one in so many of the first rows may still run in a full engine
_LEAST_S_BEHIND = 1.0
_WINDOWS, _T_90 = 10, 1.833  # Student's t of 9 degrees of freedom, two-sided 90 %
_CLOCK_S = 0.001  # the times of records are no finer


@dataclass(frozen=True, slots=True)
class Answer:
    """A row from its record, or one of its generations: answered, or failed with an error of the ``kind``.

    ``began`` and ``ended``: seconds since the epoch, from its entry into the engine's queue on. Tokens are
    those of all its attempts, ``last_tokens`` those of the last one's answers.
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


def answers_in(log: Path, offset: int = 0) -> Iterator[tuple[Answer, int]]:
    """The rows whose records are past ``offset``, and where in ``log`` each ends. A record that is being
    written is left out."""
    for line in read_lines(log, offset):
        if line.record is not None:
            yield answer_of(line.record), line.end


def answer_of(record: Record | Generation) -> Answer:
    ended, error = seconds_at(record.finished_at), record.error
    return Answer(
        record.index,
        ended - record.latency_s,
        ended,
        *tokens_in(record),
        0 if record.usage is None else record.usage.completion_tokens,
        "" if error is None else error.kind,
        "" if error is None else error.message,
    )


def seconds_at(time: str) -> float:
    """A time of a record or of the metrics, in seconds since the epoch."""
    return datetime.fromisoformat(time).timestamp()


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one period. ``interval``: 90 % of the rate, by that of its windows (Student's t). ``is_typical``: the engine
    was as busy as in the whole job, always full; or this was the whole job."""

    seconds: float
    rows: int
    prompt_tokens: int
    completion_tokens: int
    p50_ms: float
    p99_ms: float
    is_typical: bool
    interval: tuple[float, float] = (0.0, math.inf)

    @classmethod
    def of(cls, answers: Sequence[Answer], seconds: float, *, is_typical: bool) -> Figures:
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
    """Of a trial while it is running: ``at_once`` rows run at once, of ``total``, for at most ``seconds``
    with the engine full, and as long before that. ``first``: the rows that are submitted first.

    It is over earlier once the engine was full for 5 s, and for 32 rows and 4 for each that runs at once; and
    after a second and half as many, if the rate is below ``least`` even at the upper end of its interval.
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
        self.full: list[Answer] = []
        """Those that came while the engine was full, behind the one at which it became so."""
        self.answers: list[Answer] = []
        self.failed = Counter[str]()
        self.first_error = ""

    def add(self, answer: Answer) -> None:
        """The next row that is settled."""
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
        """True if the trial, whose engine ``began`` then, may stop ``now``."""
        if not self.full:
            return now >= began + self.seconds
        enough = max(ENOUGH_ROWS, ENOUGH_WAVES * self.at_once)
        is_enough = self.full_s >= ENOUGH_S and len(self.full) > enough
        return is_enough or now >= self.full[0].ended + self.seconds or self._is_behind(enough)

    def _is_behind(self, enough: int) -> bool:
        n_rows, seconds = len(self.full) - 1, self.full_s
        if seconds < _LEAST_S_BEHIND or n_rows < enough / 2 or n_rows >= self._least * seconds:
            return False  # before all rows are looked at
        return _interval([answer.ended for answer in self.full[1:]], seconds)[1] < self._least

    def figures(self, ended: float, *, is_sample: bool) -> Figures | None:
        """Of a trial that ``ended`` then; None if nothing was answered. ``is_sample``: the job has other
        rows, so that the rate of all of these is not the job's."""
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
    """Whether the time was up before the engine was full, or, if it counts tokens, before any row was answered."""
    if figures is None:
        return not measurement.failed and any(_generated(line) for line in metrics)
    return measurement.has_more and not figures.is_typical


def hung_s(measurement: Measurement, metrics: Sequence[Metrics]) -> float:
    """For how long the engine had generated nothing when the trial ended; 0 unless that is half of its time, and
    twice as long as any answer took."""
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
    """Shares, 0 to 1, while the engine was kept full; ``running`` is how many requests ran at once on
    average.

    ``rendering``: of its places that were empty because no rendered row was ready. ``preparing``: that were
    empty although there were rows, because these were still being tokenised or their images preprocessed.
    ``kv_cache``: of the time in which the KV cache was full.
    """

    rendering: float
    preparing: float
    kv_cache: float
    running: float
    preempted: int


def idle_of(measurement: Measurement, metrics: Sequence[Metrics]) -> Idle | None:
    """What kept places of the engine empty; None if it was full for too short a time to judge."""
    full, places = measurement.full, measurement.at_once
    if measurement.full_s < _LEAST_STEADY_S:
        return None
    lines = [line for line in metrics if full[0].ended <= seconds_at(line.at) <= full[-1].ended]
    if not lines:
        return None
    # By Little's law, in its queue or running; the others in flight are being prepared for that.
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
    """Of the rate at which rows ``ended``; as wide as can be if there are too few windows."""
    rate, last = len(ended) / seconds, max(ended)
    counts = Counter(min(_WINDOWS - 1, int((last - end) / seconds * _WINDOWS)) for end in ended)
    rates = [counts[n] * _WINDOWS / seconds for n in range(_WINDOWS)]
    half = _T_90 * statistics.stdev(rates) / math.sqrt(_WINDOWS)
    return max(0.0, rate - half), rate + half


def _percentile(ordered: Sequence[float], share: float) -> float:
    """By nearest rank."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
