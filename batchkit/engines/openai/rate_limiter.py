"""Limits how many requests a server gets at a time, and pauses when it turns requests away."""

from __future__ import annotations

import asyncio
import random
from collections import deque

MOST_FAULTS = 3
"""Tries of a row before the engine checks whether others are answered."""
GROWTH = 0.25
"""How much the limit grows per answer: from 1 back to 32 in some 120 answers."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
LEAST_RETRY_AFTER_S, LONGEST_RETRY_AFTER_S = 0.1, 60.0


def pause_s(tries: int) -> float:
    """Seconds to wait after ``tries`` failures in a row: doubled each time, and jittered so that
    rows, and runs, that failed together don't retry together."""
    longest = min(FIRST_PAUSE_S * 2.0 ** min(tries - 1, 16), LONGEST_PAUSE_S)
    return longest * random.uniform(0.5, 1.0)


class RateLimiter:
    """At most ``most`` requests at a time. The limit is halved whenever the server reports that it
    is busy or a request times out, is 1 while the server can't be reached, and grows with each
    answer. Belongs to one event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._limit = float(most)
        self._line: deque[asyncio.Future[None]] = deque()
        self._pause: asyncio.TimerHandle | None = None
        self._slowed_at = float("-inf")
        self._pauses = 0
        self._is_down = False
        self.running = 0
        self.troubled_since: float | None = None

    @property
    def limit(self) -> int:
        """How many may run at once now."""
        return 1 if self._is_down else int(self._limit)

    async def enter(self) -> float:
        """Wait for a place, first come, first served, and take it; returns the time of that."""
        loop = asyncio.get_running_loop()
        place = loop.create_future()
        self._line.append(place)
        self._admit()
        await place
        return loop.time()

    def leave(self) -> None:
        """Give the place back."""
        self.running -= 1
        self._admit()

    def went_well(self) -> None:
        """The server answered."""
        self.troubled_since = None
        self._pauses = 0
        self._is_down = False
        self._limit = min(self._most, self._limit + GROWTH)

    def is_troubled(self) -> None:
        """The server did not answer; ``troubled_since`` is the time of the first such failure."""
        if self.troubled_since is None:
            self.troubled_since = asyncio.get_running_loop().time()

    def turned_away(self, sent_at: float, *, is_down: bool, retry_after_s: float | None) -> None:
        """A request sent at ``sent_at`` was not accepted: pause, for ``retry_after_s`` if the
        server named a time.

        Requests that were sent before the last slowdown don't lower the limit again.
        """
        self.is_troubled()
        if self._is_new(sent_at):
            self._pauses += 1
            self._is_down = self._is_down or is_down
            if not is_down:
                self._halve()
            if retry_after_s is None:
                self._hold(pause_s(self._pauses))
        if retry_after_s is not None:
            wait_s = min(max(retry_after_s, LEAST_RETRY_AFTER_S), LONGEST_RETRY_AFTER_S)
            self._hold(wait_s * random.uniform(1.0, 1.1))

    def timed_out(self, sent_at: float) -> None:
        """A request sent at ``sent_at`` timed out: most likely there are too many at a time."""
        self.is_troubled()
        if self._is_new(sent_at):
            self._halve()

    def _is_new(self, sent_at: float) -> bool:
        """Whether the request was sent since the last slowdown; if so, the last slowdown is now."""
        if sent_at < self._slowed_at:
            return False
        self._slowed_at = asyncio.get_running_loop().time()
        return True

    def _halve(self) -> None:
        self._limit = max(1.0, self._limit / 2)

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
        while self._line and self._pause is None and self.running < self.limit:
            place = self._line.popleft()
            if not place.done():  # else its task was cancelled
                self.running += 1
                place.set_result(None)


class Away:
    """How long a row has been turned away while others were answered.

    A busy server turns rows away, too, and answers each of them eventually. So a row fails only if
    it is still turned away after ``give_up_s``; until then it is retried less and less often.
    """

    def __init__(self, give_up_s: float, answers: int) -> None:
        self._give_up_s = give_up_s
        self.answers = answers
        self._since: float | None = None
        self._alone = 0
        self.tries = 0

    @property
    def is_suspicious(self) -> bool:
        """Whether it is time to check if the server answers anything at all."""
        return self._alone + self.tries >= MOST_FAULTS

    def is_final(self, now: float) -> bool:
        """Count that the row was turned away while others were answered; True if it now fails."""
        self.tries += 1
        self._since = now if self._since is None else self._since
        return self.tries >= MOST_FAULTS and now - self._since >= self._give_up_s

    def count_alone(self) -> None:
        """Count that the row was turned away while no other row was answered."""
        self._alone += 1
