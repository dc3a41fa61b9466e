"""Limits how many requests a server gets at a time; while it answers none, one probe at a time."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from enum import Enum, auto
from typing import NamedTuple

MOST_FAULTS = 3
"""Tries of a row until it fails, if others are answered; failures in a row until requests wait."""
GROWTH = 0.25
"""How much the limit grows per answer: from 1 back to 32 in some 120 answers."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
LEAST_RETRY_AFTER_S = 0.1


class Why(Enum):
    """Why a try gave no answer."""

    BUSY = auto()  # turned away: there are too many requests
    DOWN = auto()  # turned away: the server can't be reached
    SLOW = auto()  # no answer in time
    FAULT = auto()  # it failed on the request, or on all
    BARRED = auto()  # refused, for a reason that may apply to all


class NoAnswer(Exception):
    """A try without an answer: the row's own failure if others are answered, else the server's.

    ``stops``: why the run stops if every request is refused so. ``retry_after_s``: the time that the
    server named.
    """

    def __init__(
        self,
        message: str,
        why: Why = Why.FAULT,
        *,
        retry_after_s: float | None = None,
        stops: str | None = None,
    ) -> None:
        super().__init__(message)
        self.why, self.retry_after_s, self.stops = why, retry_after_s, stops


class Place(NamedTuple):
    """A request's turn, since the time ``since``."""

    since: float
    is_probe: bool


def pause_s(tries: int) -> float:
    """Seconds to wait after ``tries`` failures in a row: doubled each time, and jittered so that
    rows, and runs, that failed together don't retry together."""
    longest = min(FIRST_PAUSE_S * 2.0 ** min(tries - 1, 16), LONGEST_PAUSE_S)
    return longest * random.uniform(0.5, 1.0)


class RateLimiter:
    """At most ``most`` requests at a time. The limit is halved whenever the server reports that it
    is busy or a request times out, and grows with each answer.

    If it can't be reached, bars a request, or fails as often in a row as requests are running, the limiter
    ``is_open``: there is one request at a time, a probe, after pauses that grow, until one is answered.
    ``longest_wait_s``: of what a server may ask for. Belongs to one event loop; any thread may read.
    """

    def __init__(self, most: int, longest_wait_s: float = LONGEST_PAUSE_S) -> None:
        self._most, self._longest_wait_s = most, max(longest_wait_s, LONGEST_PAUSE_S)
        self._limit = float(most)
        self._line: deque[asyncio.Future[bool]] = deque()
        self._pause: asyncio.TimerHandle | None = None
        self._slowed_at = self._opened_at = float("-inf")
        self._failures = self._pauses = 0
        self._is_probing = False
        self.is_open = False
        self.running = 0
        self.newest_answered = float("-inf")
        """When the newest of the requests that were answered was sent."""
        self.troubled_since: float | None = None
        self.last_problem = ""

    @property
    def limit(self) -> int:
        """How many may run at once now."""
        return 1 if self.is_open else int(self._limit)

    @property
    def waits_s(self) -> float:
        """Seconds until the next request may be sent."""
        pause = self._pause
        return 0.0 if pause is None else max(0.0, pause.when() - time.monotonic())

    async def enter(self) -> Place:
        """Wait for a place, first come, first served, and take it."""
        loop = asyncio.get_running_loop()
        place = loop.create_future()
        self._line.append(place)
        self._admit()
        is_probe = await place
        return Place(loop.time(), is_probe)

    def leave(self, place: Place) -> None:
        """Give the place back."""
        self.running -= 1
        if place.is_probe:
            self._is_probing = False
        self._admit()

    def went_well(self, place: Place) -> None:
        """The server answered; only an answer to a request sent since shows that it is well again."""
        self.troubled_since = None
        self._limit = min(self._most, self._limit + GROWTH)
        self.newest_answered = max(self.newest_answered, place.since)
        if place.since >= self._opened_at:
            self.is_open, self._failures, self._pauses = False, 0, 0

    def failed(self, place: Place, problem: NoAnswer) -> None:
        """The server did not answer.

        Requests that were sent before the last slowdown don't lower the limit again.
        """
        now = asyncio.get_running_loop().time()
        if self.troubled_since is None:
            self.troubled_since = now
        self.last_problem = str(problem)
        is_new = place.since >= self._slowed_at
        if is_new:
            self._slowed_at = now
            if problem.why in (Why.BUSY, Why.SLOW):
                self._limit = max(1.0, self._limit / 2)
        self._failures += is_new or problem.why is not Why.BUSY
        if not self.is_open and (
            problem.why in (Why.DOWN, Why.BARRED)
            or self._failures >= max(MOST_FAULTS, self.running)
        ):
            self.is_open, self._opened_at = True, now
        if problem.retry_after_s is not None:
            wait_s = min(max(problem.retry_after_s, LEAST_RETRY_AFTER_S), self._longest_wait_s)
            self._hold(wait_s * random.uniform(1.0, 1.1))
        elif is_new and (self.is_open or problem.why is Why.BUSY):
            self._pauses += 1
            self._hold(pause_s(self._pauses))

    def _hold(self, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s
        if self._pause is None or self._pause.when() < until:
            if self._pause is not None:
                self._pause.cancel()
            self._pause = loop.call_at(until, self._go_on)

    def _go_on(self) -> None:
        self._pause = None
        self._admit()

    def _admit(self) -> None:
        while self._line and self._pause is None and self._has_room:
            place = self._line.popleft()
            if not place.done():  # else its task was cancelled
                self.running += 1
                self._is_probing = self.is_open
                place.set_result(self.is_open)

    @property
    def _has_room(self) -> bool:
        """Requests that were sent before the limiter was opened may take long: no probe waits for them."""
        return not self._is_probing if self.is_open else self.running < self.limit
