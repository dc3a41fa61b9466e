"""Finds the rows that kill an engine, by replaying suspects in halves.

After a death every request in flight is a suspect. They are replayed in two groups, with no other
request in flight; a group that kills the engine again is split, until the row at fault is alone. A
row is quarantined when it has killed the engine alone twice in the same way: a single death may be
an accident of the machine. Once a search has ended without a quarantine, accidents are known to
happen, and from then on three deaths are needed.

Remaining suspects are passed to the next start as ``Suspicion``s, so that a search that was killed
continues where it was.

So k poison rows among n cost at most about k * (log2(n) + 2) restarts, and every other row is
answered. Large groups go first: their answers show early that the engine works.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

from batchkit.storage.manifest import Suspicion
from batchkit.types import Key

PROOF, PROOF_AMONG_ACCIDENTS = 2, 3

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Group(Generic[T]):
    """Requests to be replayed together. ``deaths``: how a lone one killed the engine, each time.

    ``recalled_from``: the number of the group of an earlier start that they belong to.
    """

    requests: Sequence[T]
    deaths: tuple[str, ...] = ()
    is_quarantined: bool = False
    recalled_from: int | None = None


class Suspects(Generic[T]):
    """Groups of requests that have yet to be replayed, each with no other request in flight.

    The caller decides what a request is and what it kills: an engine's Request, a worker's Task.

    ``among_accidents``: an earlier search has ended without a quarantine.
    """

    def __init__(self, *, among_accidents: bool = False) -> None:
        self._groups: deque[Group[T]] = deque()
        self._replaying: Group[T] | None = None
        self.among_accidents = among_accidents
        self._without_quarantine = False

    def __bool__(self) -> bool:
        """True while a group waits or is being replayed."""
        return self._replaying is not None or bool(self._groups)

    def __len__(self) -> int:
        """Requests that wait for replay."""
        return sum(len(group.requests) for group in self._groups)

    @property
    def groups(self) -> Sequence[Group[T]]:
        """The groups that wait for replay, in order."""
        return list(self._groups)

    def died(self, in_flight: Sequence[T], cause: str) -> T | None:
        """Record a death with these in flight. Returns the poison row if proven, else None."""
        if not self:
            self._without_quarantine = True
        replayed, self._replaying = self._replaying, None
        if replayed is not None and len(in_flight) == 1:
            deaths = (*replayed.deaths, cause)
            if replayed.is_quarantined or deaths.count(cause) >= self._proof:
                self._without_quarantine = False
                return in_flight[0]
            self._groups.append(Group(in_flight, deaths))
            return None
        half = (len(in_flight) + 1) // 2
        self._groups += [Group(g) for g in (in_flight[:half], in_flight[half:]) if g]
        return None

    def suspect(self, request: T) -> None:
        """Replay ``request`` alone; it was quarantined before, so one death is proof."""
        self._groups.append(Group([request], is_quarantined=True))

    def recall(self, request: T, group: int, deaths: Sequence[str]) -> None:
        """Suspect ``request`` as an earlier start did: it joins the group of that number if one
        still waits, else it starts one."""
        if not self:
            self._without_quarantine = True
        for place, waiting in enumerate(self._groups):
            if waiting.recalled_from == group:
                self._groups[place] = replace(waiting, requests=[*waiting.requests, request])
                return
        self._groups.append(Group([request], tuple(deaths), recalled_from=group))

    def interpose(self, requests: Sequence[T]) -> None:
        """Replay these next. They are not suspects; they show whether the engine works."""
        self._groups.appendleft(Group(requests))

    def single_out(self) -> None:
        """Replay one row of the largest group next, alone: most rows of a group are good."""
        if self._groups:
            largest = max(self._groups, key=lambda group: len(group.requests))
            if len(largest.requests) > 1:
                self._groups.remove(largest)
                self._groups.append(Group(largest.requests[1:]))
                self._groups.appendleft(Group(largest.requests[:1]))

    def next_group(self) -> Sequence[T]:
        """The group to replay now that nothing is in flight; empty if no group is left."""
        self._replaying = self._groups.popleft() if self._groups else None
        if self._replaying is not None:
            return self._replaying.requests
        if self._without_quarantine:
            self.among_accidents, self._without_quarantine = True, False
        return ()

    @property
    def _proof(self) -> int:
        return PROOF_AMONG_ACCIDENTS if self.among_accidents else PROOF


class Recalled(NamedTuple):
    """A row of an earlier start's group number ``group``."""

    group: int
    suspicion: Suspicion


class Expected:
    """What an earlier start suspected, until those rows are read again."""

    def __init__(self, suspicions: Sequence[Suspicion]) -> None:
        self._suspicions = suspicions
        self._rows = {
            key: (group, input_hash)
            for group, suspicion in enumerate(suspicions)
            for key, input_hash in suspicion.rows
        }

    def pop(self, key: Key, input_hash: str) -> Recalled | None:
        """What was known of this request; None if nothing was, or if it has changed since."""
        group, known_hash = self._rows.pop(key, (0, None))
        return Recalled(group, self._suspicions[group]) if known_hash == input_hash else None

    def suspicions(self) -> list[Suspicion]:
        """Those of the requests that have not come yet."""
        return narrowed(self._suspicions, self._rows.__contains__)


def narrowed(suspicions: Sequence[Suspicion], may_come: Callable[[Key], bool]) -> list[Suspicion]:
    """The same groups without the requests that do not come."""
    rows = [[row for row in suspicion.rows if may_come(row[0])] for suspicion in suspicions]
    return [
        suspicion.model_copy(update={"rows": left})
        for suspicion, left in zip(suspicions, rows, strict=True)
        if left
    ]
