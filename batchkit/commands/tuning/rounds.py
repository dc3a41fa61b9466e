"""Measurements: rates and latencies over periods in which the engine was kept full.

An engine that has just started answers short rows first, and one that runs out of rows is half
empty; a job of many rows has little of either. So the first round begins when all rows that were
submitted first, as many as run at once, are answered, and the last one ends when fewer rows than that
are left. (If it began when merely that many rows were answered, with lengths from 6 to 96 tokens and 64
at once, the answers had 0.7 of the tokens a second that they have in a long run.) If that leaves
nothing, because there are few rows or little time, the whole trial is one round; and if the trial has
answered every row of the job, its own rate is used.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise, starmap
from typing import NamedTuple

from batchkit.commands.trial import Answer

ENOUGH_S, ENOUGH_ROWS, ENOUGH_WAVES = 5.0, 32, 4
_LEAST_ROWS = 4
_CLOCK_S = 0.001  # the times of records are no finer


class Budget(NamedTuple):
    """At most ``seconds`` for each of ``rounds``, and as long before them.

    A round ends earlier once it has lasted 5 s and has 32 rows, and 4 for each that runs at once.
    """

    seconds: float
    rounds: int = 1


class Bound(NamedTuple):
    """A moment ``at`` which ``rows`` had been answered."""

    at: float
    rows: int


class Period(NamedTuple):
    since: Bound
    until: Bound

    @property
    def seconds(self) -> float:
        return self.until.at - self.since.at

    def of(self, answers: Sequence[Answer]) -> Sequence[Answer]:
        """Those that came in it; by their number, since many may end within one millisecond."""
        return answers[self.since.rows : self.until.rows]


@dataclass(frozen=True, slots=True)
class Round:
    """One period. ``is_typical``: the engine was as busy as in the whole job, always full; or this was
    the whole job."""

    seconds: float
    rows: int
    prompt_tokens: int
    completion_tokens: int
    p50_ms: float
    p99_ms: float
    is_typical: bool

    @classmethod
    def of(cls, answers: Sequence[Answer], seconds: float, *, is_typical: bool) -> Round:
        seconds = max(seconds, _CLOCK_S)
        latencies = sorted(answer.latency_s for answer in answers)
        return cls(
            seconds=seconds,
            rows=len(answers),
            prompt_tokens=sum(answer.prompt_tokens for answer in answers),
            completion_tokens=sum(answer.completion_tokens for answer in answers),
            p50_ms=1000 * _percentile(latencies, 0.50),
            p99_ms=1000 * _percentile(latencies, 0.99),
            is_typical=is_typical,
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


class Rounds:
    """Cuts a trial into rounds while it is running. ``batch_size`` rows run at once, of ``total``;
    ``first``: those that are submitted first, as many."""

    def __init__(
        self, batch_size: int, budget: Budget, *, total: int, first: Collection[int]
    ) -> None:
        self.batch_size = batch_size
        self._budget = budget
        self._left = total
        self._first = set(first)
        self._bounds: list[Bound] = []
        self._full_until = Bound(0.0, 0)
        self.answers: list[Answer] = []
        self.failed = Counter[str]()
        self.first_error = ""

    def add(self, answer: Answer) -> None:
        """The next row that is settled; begins and ends rounds."""
        self._left -= 1
        self._first.discard(answer.index)
        if answer.kind:
            self.failed[answer.kind] += 1
            self.first_error = self.first_error or f"{answer.kind}: {answer.message}"
        else:
            self.answers.append(answer)
        if self._left < self.batch_size:
            return
        self._full_until = Bound(answer.ended, len(self.answers))
        if self._is_at_bound(self._full_until) if self._bounds else not self._first:
            self._bounds.append(self._full_until)

    def is_over(self, began: float, now: float) -> bool:
        """True if the trial, whose engine ``began`` then, may stop ``now``."""
        if len(self._bounds) > self._budget.rounds:
            return True
        seconds = self._budget.seconds
        return now >= (
            self._bounds[0].at + seconds * self._budget.rounds if self._bounds else began + seconds
        )

    @property
    def steady(self) -> Period | None:
        """From the begin of the first round on, as long as the engine was full; None if it never was."""
        if not self._bounds:
            return None
        return Period(self._bounds[0], self._full_until)

    def cut(self, ended: float, *, is_sample: bool) -> list[Round]:
        """The rounds of a trial that ``ended`` then; none if nothing was answered. ``is_sample``: the job
        has other rows, so that the rate of all of these is not the job's."""
        answers, bounds = self.answers, list(self._bounds)
        if not answers:
            return []
        is_open = 0 < len(bounds) <= self._budget.rounds
        if is_open and self._full_until.rows - bounds[-1].rows >= self._least_rows:
            bounds.append(self._full_until)
        is_whole = not self._left and not is_sample
        if len(bounds) < 2 or (is_whole and self._budget.rounds == 1):
            end = ended if self._left else answers[-1].ended
            seconds = end - min(answer.began for answer in answers)
            return [Round.of(answers, seconds, is_typical=is_whole)]
        return [
            Round.of(period.of(answers), period.seconds, is_typical=True)
            for period in starmap(Period, pairwise(bounds))
        ]

    @property
    def _least_rows(self) -> int:
        return max(_LEAST_ROWS, self.batch_size)

    def _is_at_bound(self, now: Bound) -> bool:
        """True if a round ends now and the next one begins."""
        if len(self._bounds) > self._budget.rounds:
            return False
        took_s, more = now.at - self._bounds[-1].at, now.rows - self._bounds[-1].rows
        enough = max(ENOUGH_ROWS, ENOUGH_WAVES * self.batch_size)
        if took_s >= ENOUGH_S and more >= enough:
            return True
        return took_s >= self._budget.seconds and more >= self._least_rows


def _percentile(ordered: Sequence[float], share: float) -> float:
    """By nearest rank."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
