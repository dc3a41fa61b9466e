"""Finds the rows that kill an engine, by replaying suspects in halves.

After a death every request in flight is a suspect. They are replayed alone, in two groups; a group
that kills the engine again is split, until the one at fault stands alone. So k poison rows among n
cost at most about k * (log2(n) + 1) restarts, and every other row is answered. Large groups go
first: most of them hold no poison, and their answers show that the engine is sound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from batchkit.types import Request

CONVICTION = 3
"""Deaths that a row must have been there for: one or two may be an accident of the machine."""


class _Group(NamedTuple):
    """Requests that were all in flight at each of so many deaths."""

    requests: Sequence[Request]
    deaths: int


class Suspects:
    """Groups of requests that have yet to be replayed, each without any other request beside it."""

    def __init__(self) -> None:
        self._groups: deque[_Group] = deque()
        self._replaying: _Group | None = None

    def __bool__(self) -> bool:
        """True while a group waits or is being replayed."""
        return self._replaying is not None or bool(self._groups)

    def __len__(self) -> int:
        """Requests that wait for their replay."""
        return sum(len(group.requests) for group in self._groups)

    def died(self, in_flight: Sequence[Request]) -> Request | None:
        """The engine died with these in flight. The poison row, if that is proven now; else None."""
        deaths = 1 + (self._replaying.deaths if self._replaying else 0)
        self._replaying = None
        if len(in_flight) == 1 and deaths >= CONVICTION:
            return in_flight[0]
        half = (len(in_flight) + 1) // 2
        for group in (in_flight[:half], in_flight[half:]):
            if group:
                self._groups.append(_Group(group, deaths))
        return None

    def suspect(self, request: Request) -> None:
        """Replay ``request`` alone; it was convicted before, so that one death proves it."""
        self._groups.append(_Group([request], CONVICTION - 1))

    def interpose(self, requests: Sequence[Request]) -> None:
        """Play these next. They are under no suspicion; they show whether the engine is sound."""
        self._groups.appendleft(_Group(requests, 0))

    def next_group(self) -> Sequence[Request]:
        """The group to replay now that nothing is in flight; empty when all are cleared."""
        self._replaying = self._groups.popleft() if self._groups else None
        return self._replaying.requests if self._replaying else ()
