"""Measurements: rates and latencies over periods in which the window was kept full.

An engine that has just started answers short rows first, and one that runs out of rows is half
empty; a job of many rows has little of either. So the first round begins when all rows that were
submitted first, as many as run at once, are answered, and the last one ends when no row is left to
refill the window with. (If it began when merely that many rows were answered, with lengths from 6
to 96 tokens and 64 at once, the answers had 0.7 of the tokens a second that they have in a long
run.) If that leaves nothing, because there are few rows or little time, the whole feed is one
round; and if the feed has answered every row of the job, its own rate is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

ENOUGH_S, ENOUGH_ROWS, ENOUGH_WAVES = 5.0, 32, 4
_LEAST_ROWS = 4


class Budget(NamedTuple):
    """At most ``seconds`` for each of ``rounds``, and as long before them.

    A round ends earlier once it has lasted 5 s and has 32 rows, and 4 for each that runs at once.
    """

    seconds: float
    rounds: int = 1

    @property
    def most_s(self) -> float:
        return self.seconds * (1 + self.rounds)


class TimedAnswer(NamedTuple):
    """A row that was answered, ``at`` seconds after the first one was submitted.

    ``latency_s`` is measured from its entry into the engine's queue.
    """

    at: float
    latency_s: float
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Round:
    """One period. ``is_typical``: the engine was as busy as in the whole job, its window always
    full; or this was the whole job."""

    seconds: float
    rows: int
    prompt_tokens: int
    completion_tokens: int
    p50_ms: float
    p99_ms: float
    is_typical: bool

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
    """Cuts a feed into rounds while it is running. ``batch_size`` is how many rows run at once."""

    def __init__(self, batch_size: int, budget: Budget) -> None:
        self._batch_size = batch_size
        self._budget = budget
        self._bounds: list[float] = []
        self._rows_at_bound = 0
        self._full_until = 0.0
        self._rows_when_full = 0
        self._is_full = True

    @property
    def is_steady(self) -> bool:
        """The first round has begun, and there are rows to refill the window with."""
        return bool(self._bounds) and self._is_full

    def is_over(self, now: float, rows: int, *, has_begun: bool, has_more: bool) -> bool:
        """True if the feed may stop ``now``, with ``rows`` answered; begins and ends rounds.

        ``has_begun``: the rows submitted first are all answered. ``has_more``: there are rows to
        refill the window with.
        """
        self._is_full = self._is_full and has_more
        if self._is_full:
            self._full_until, self._rows_when_full = now, rows
            if self._is_at_bound(now, rows) if self._bounds else has_begun:
                self._bounds.append(now)
                self._rows_at_bound = rows
        if len(self._bounds) > self._budget.rounds:
            return True
        seconds = self._budget.seconds
        return now >= (self._bounds[0] + seconds * self._budget.rounds if self._bounds else seconds)

    def cut(self, answers: Sequence[TimedAnswer], end: float, *, is_whole: bool) -> list[Round]:
        """The rounds of a feed that ended at ``end``; none if nothing was answered.

        ``is_whole``: it has answered all rows of the job, so that its own rate is the job's.
        """
        bounds = list(self._bounds)
        is_open = 0 < len(bounds) <= self._budget.rounds
        if is_open and self._rows_when_full - self._rows_at_bound >= self._least_rows:
            bounds.append(self._full_until)
        if len(bounds) < 2 or (is_whole and self._budget.rounds == 1):
            return [_round(answers, end, is_typical=is_whole)] if answers else []
        return [
            _round([a for a in answers if since < a.at <= until], until - since, is_typical=True)
            for since, until in pairwise(bounds)
        ]

    @property
    def _least_rows(self) -> int:
        return max(_LEAST_ROWS, self._batch_size)

    def _is_at_bound(self, now: float, rows: int) -> bool:
        """True if a round ends now and the next one begins."""
        if len(self._bounds) > self._budget.rounds:
            return False
        took_s, more = now - self._bounds[-1], rows - self._rows_at_bound
        enough = max(ENOUGH_ROWS, ENOUGH_WAVES * self._batch_size)
        if took_s >= ENOUGH_S and more >= enough:
            return True
        return took_s >= self._budget.seconds and more >= self._least_rows


def _round(answers: Sequence[TimedAnswer], seconds: float, *, is_typical: bool) -> Round:
    latencies = sorted(answer.latency_s for answer in answers)
    return Round(
        seconds=max(seconds, 1e-6),
        rows=len(answers),
        prompt_tokens=sum(answer.prompt_tokens for answer in answers),
        completion_tokens=sum(answer.completion_tokens for answer in answers),
        p50_ms=1000 * _percentile(latencies, 0.50),
        p99_ms=1000 * _percentile(latencies, 0.99),
        is_typical=is_typical,
    )


def _percentile(ordered: Sequence[float], share: float) -> float:
    """By nearest rank."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
