"""Finds the rows that kill an engine, by replaying suspects in halves.

After a death every request in flight is a suspect. They are replayed in two groups, with nothing else
beside them; a group that kills the engine again is split, until the one at fault stands alone. A row
is convicted when it has killed the engine alone twice in the same way: once may be an accident of
the machine. Where a search has ended without a conviction, accidents do happen, and it takes three
times from then on.

So k poison rows among n cost at most about k * (log2(n) + 2) restarts, and every other row is
answered. Large groups go first: their answers show early that the engine is sound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

PROOF, PROOF_AMONG_ACCIDENTS = 2, 3

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Group(Generic[T]):
    """Requests to be replayed together. ``deaths``: the causes of those that a lone one died."""

    requests: Sequence[T]
    deaths: tuple[str, ...] = ()
    is_convict: bool = False


class Suspects(Generic[T]):
    """Groups of requests that have yet to be replayed, each without any other request beside it.

    What a request is, and what it kills, is the caller's: an engine's Request, a worker's Task.

    ``among_accidents``: an earlier search has ended without a conviction.
    """

    def __init__(self, *, among_accidents: bool = False) -> None:
        self._groups: deque[_Group[T]] = deque()
        self._replaying: _Group[T] | None = None
        self.among_accidents = among_accidents
        self._without_conviction = False

    def __bool__(self) -> bool:
        """True while a group waits or is being replayed."""
        return self._replaying is not None or bool(self._groups)

    def __len__(self) -> int:
        """Requests that wait for their replay."""
        return sum(len(group.requests) for group in self._groups)

    def died(self, in_flight: Sequence[T], cause: str) -> T | None:
        """The engine died with these in flight. The poison row, if that is proven now; else None."""
        if not self:
            self._without_conviction = True
        replayed, self._replaying = self._replaying, None
        if replayed is not None and len(in_flight) == 1:
            deaths = (*replayed.deaths, cause)
            if replayed.is_convict or deaths.count(cause) >= self._proof:
                self._without_conviction = False
                return in_flight[0]
            self._groups.append(_Group(in_flight, deaths))
            return None
        half = (len(in_flight) + 1) // 2
        self._groups += [_Group(g) for g in (in_flight[:half], in_flight[half:]) if g]
        return None

    def suspect(self, request: T) -> None:
        """Replay ``request`` alone; it was convicted before, so that one death proves it."""
        self._groups.append(_Group([request], is_convict=True))

    def interpose(self, requests: Sequence[T]) -> None:
        """Play these next. They are under no suspicion; they show whether the engine is sound."""
        self._groups.appendleft(_Group(requests))

    def single_out(self) -> None:
        """Play one of the largest group next, alone: of a few poison rows among many, most are good."""
        if self._groups:
            largest = max(self._groups, key=lambda group: len(group.requests))
            if len(largest.requests) > 1:
                self._groups.remove(largest)
                self._groups.append(_Group(largest.requests[1:]))
                self._groups.appendleft(_Group(largest.requests[:1]))

    def next_group(self) -> Sequence[T]:
        """The group to replay now that nothing is in flight; empty when all are cleared."""
        self._replaying = self._groups.popleft() if self._groups else None
        if self._replaying is not None:
            return self._replaying.requests
        if self._without_conviction:
            self.among_accidents, self._without_conviction = True, False
        return ()

    @property
    def _proof(self) -> int:
        return PROOF_AMONG_ACCIDENTS if self.among_accidents else PROOF
