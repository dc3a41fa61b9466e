"""The rate limiter of one server. It limits concurrent requests, and sends single probes during an outage."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from enum import Enum, auto
from typing import NamedTuple

MOST_FAULTS = 3
"""Number of attempts after which a row fails if other rows are answered. Also the minimum number of failures in
sequence that opens the limiter."""
GROWTH = 0.25
"""Increase of the limit per answer: from 1 back to 32 takes about 120 answers."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
LEAST_RETRY_AFTER_S = 0.1


class Why(Enum):
    """The reason why an attempt gave no answer."""

    BUSY = auto()  # rejected: too many requests
    DOWN = auto()  # the server can't be reached
    SLOW = auto()  # no answer in time
    FAULT = auto()  # the server failed on this request, or on every request
    BARRED = auto()  # refused for a reason that may apply to every request


class NoAnswer(Exception):
    """An attempt without an answer. The row is at fault if other rows are answered; otherwise the server is.

    - ``stops``: message with which the run stops if every request is refused in this way; None if it does not stop.
    - ``retry_after_s``: delay that the server asked for; None if it asked for none.
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


class RequestSlot(NamedTuple):
    """A permit to send one request, granted at ``since`` (the event loop's time in seconds)."""

    since: float
    is_probe: bool


def pause_s(tries: int) -> float:
    """Return the seconds to wait after ``tries`` failures in sequence.

    The time doubles with each failure. The time is jittered, so that rows and runs that failed together do not retry
    together.
    """
    longest = min(FIRST_PAUSE_S * 2.0 ** min(tries - 1, 16), LONGEST_PAUSE_S)
    return longest * random.uniform(0.5, 1.0)


class RateLimiter:
    """A limiter of concurrent requests to one server. Use it from one event loop only; any thread may read its
    attributes.

    At most ``most`` requests run at a time. This limit is halved when the server reports that it is busy or when a
    request times out, and grows with each answer.

    The limiter opens, like a circuit breaker, in three cases: the server can't be reached; the server refuses a request
    for a reason that may apply to all requests; or the number of failures in sequence reaches the number of running
    requests (at least 3). While the limiter ``is_open``, one probe at a time is sent, after growing pauses, until one
    is answered.

    ``longest_wait_s``: maximum delay in seconds that a server may ask for (at least 30); longer delays are shortened.
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
        """Send time of the most recently sent request that was answered."""
        self.troubled_since: float | None = None
        self.last_problem = ""

    @property
    def limit(self) -> int:
        """The number of requests that may run at the same time now."""
        return 1 if self.is_open else int(self._limit)

    @property
    def waits_s(self) -> float:
        """Seconds until the next request may be sent."""
        pause = self._pause
        return 0.0 if pause is None else max(0.0, pause.when() - time.monotonic())

    async def enter(self) -> RequestSlot:
        """Wait for a permit to send a request. Permits are given in the order of the calls."""
        loop = asyncio.get_running_loop()
        place = loop.create_future()
        self._line.append(place)
        self._admit()
        is_probe = await place
        return RequestSlot(loop.time(), is_probe)

    def leave(self, place: RequestSlot) -> None:
        """Give the permit back after the request."""
        self.running -= 1
        if place.is_probe:
            self._is_probing = False
        self._admit()

    def went_well(self, place: RequestSlot) -> None:
        """Record an answer. The answer closes an open limiter only if its request was sent after the limiter opened."""
        self.troubled_since = None
        self._limit = min(self._most, self._limit + GROWTH)
        self.newest_answered = max(self.newest_answered, place.since)
        if place.since >= self._opened_at:
            self.is_open, self._failures, self._pauses = False, 0, 0

    def failed(self, place: RequestSlot, problem: NoAnswer) -> None:
        """Record a request without an answer, and lower the limit or open the limiter if needed.

        A request sent before the limit was last lowered does not lower it again.
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
            self._pause = loop.call_at(until, self._resume)

    def _resume(self) -> None:
        self._pause = None
        self._admit()

    def _admit(self) -> None:
        while self._line and self._pause is None and self._has_room:
            place = self._line.popleft()
            if not place.done():  # otherwise its task was cancelled
                self.running += 1
                self._is_probing = self.is_open
                place.set_result(self.is_open)

    @property
    def _has_room(self) -> bool:
        """True if a request may be sent. A probe does not wait for requests sent before the limiter opened."""
        return not self._is_probing if self.is_open else self.running < self.limit
