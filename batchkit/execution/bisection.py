"""A search for the rows that kill an engine (poison rows). It replays the suspects in halves.

After the engine's death, every request in flight is a suspect. The suspects are replayed in two groups, with no other
request in flight. If a group kills the engine again, the group is split, until the poison row is alone.

A row is quarantined when it has killed the engine alone twice in the same way: a single death may be an accident of the
machine. If a search ends without a quarantine, the machine is known to have accidents. From then on, three deaths are
needed.

k poison rows among n cost at most about k * (log2(n) + 2) restarts, and every other row is answered. Large groups are
replayed first, because their answers show early that the engine works.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from msgspec.structs import replace

from batchkit.types import Completion, Request

PROOF, PROOF_AMONG_ACCIDENTS = 2, 3  # deaths that prove a row to be at fault

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SuspectGroup(Generic[T]):
    """Requests to replay together, because one of them may kill the engine.

    ``deaths``: why the engine died each time it ran this request alone; empty for larger groups. ``is_quarantined``: an
    earlier start quarantined the request, so one more death is proof.
    """

    requests: Sequence[T]
    deaths: tuple[str, ...] = ()
    is_quarantined: bool = False


class Suspects(Generic[T]):
    """A queue of groups of requests to replay. While a group is replayed, no other request is in flight.

    The type ``T`` is Request for an engine, and Task for a worker on Ray.
    """

    def __init__(self) -> None:
        self._groups: deque[SuspectGroup[T]] = deque()
        self._replaying: SuspectGroup[T] | None = None
        self._among_accidents = False  # a search has ended without a quarantine
        self._without_quarantine = False

    def __bool__(self) -> bool:
        """Return True while a group waits or is being replayed."""
        return self._replaying is not None or bool(self._groups)

    def __len__(self) -> int:
        """Return the number of requests that wait for replay."""
        return sum(len(group.requests) for group in self._groups)

    def record_death(self, in_flight: Sequence[T], cause: str) -> T | None:
        """Record that the engine died while ``in_flight`` ran. Return the poison row if this death proves one,
        otherwise None."""
        if not self:
            self._without_quarantine = True
        replayed, self._replaying = self._replaying, None
        if replayed is not None and len(in_flight) == 1:
            deaths = (*replayed.deaths, cause)
            proof = PROOF_AMONG_ACCIDENTS if self._among_accidents else PROOF
            if replayed.is_quarantined or deaths.count(cause) >= proof:
                self._without_quarantine = False
                return in_flight[0]
            self._groups.append(SuspectGroup(in_flight, deaths))
            return None
        half = (len(in_flight) + 1) // 2
        self._groups += [SuspectGroup(g) for g in (in_flight[:half], in_flight[half:]) if g]
        return None

    def suspect(self, request: T) -> None:
        """Queue ``request`` to be replayed alone. An earlier start quarantined it, so one death is proof."""
        self._groups.append(SuspectGroup([request], is_quarantined=True))

    def interpose(self, requests: Sequence[T]) -> None:
        """Queue ``requests`` as the next group. They are not suspects: their answers show whether the engine works."""
        self._groups.appendleft(SuspectGroup(requests))

    def single_out(self) -> None:
        """Queue one request of the largest group as the next group. It is probably harmless, because most requests of a
        large group are; its answer then shows that the engine works."""
        if self._groups:
            largest = max(self._groups, key=lambda group: len(group.requests))
            if len(largest.requests) > 1:
                self._groups.remove(largest)
                self._groups.append(SuspectGroup(largest.requests[1:]))
                self._groups.appendleft(SuspectGroup(largest.requests[:1]))

    def next_group(self) -> Sequence[T]:
        """Return the next group to replay, or an empty one. Call it only while no request is in flight."""
        self._replaying = self._groups.popleft() if self._groups else None
        if self._replaying is not None:
            return self._replaying.requests
        if self._without_quarantine:
            self._among_accidents, self._without_quarantine = True, False
        return ()


class RowSearch(Suspects[Request]):
    """The suspects of one engine, the rows that earlier searches have quarantined, and the probe.

    The probe is a request that was answered before. Its second answer shows that the engine works; it is dropped.

    ``quarantined``: indexes of rows that killed an engine in an earlier start; each runs alone, and only once.
    """

    def __init__(self, quarantined: Iterable[int]) -> None:
        super().__init__()
        self._quarantined = set(quarantined)
        self._answered: Request | None = None
        self._probe: Request | None = None

    def is_quarantined(self, request: Request) -> bool:
        return request.row.index in self._quarantined

    def quarantine(self, request: Request) -> None:
        """Let the row of ``request`` run alone, and only once, from now on."""
        self._quarantined.add(request.row.index)

    def note_answers(self, answered: Sequence[Request]) -> None:
        """Remember one of the requests that the engine has answered, for the probe."""
        self._answered = answered[-1]

    def prove_sound(self, held: deque[Request]) -> None:
        """Queue a row that is most likely harmless. Its answer shows that the engine works.

        The row is the first of these that exists: one of ``held``, which wait for the search to end; the probe; a
        suspect.
        """
        if held:
            self.interpose([held.popleft()])
        elif self._answered is not None:
            sampling = {**self._answered.sampling, "max_tokens": 1, "min_tokens": 0}
            self._probe = replace(self._answered, sampling=sampling)
            self.interpose([self._probe])
        else:
            self.single_out()

    def without_probe(self, requests: Iterable[Request]) -> list[Request]:
        """Return ``requests`` without the probe."""
        return [request for request in requests if request is not self._probe]

    def drop_probe(self, done: Iterable[Completion]) -> list[Completion]:
        """Return ``done`` without the probe's completion. A failed probe is not used again."""
        left = []
        for completion in done:
            if completion.request is not self._probe:
                left.append(completion)
            elif completion.error is not None:
                self._answered = None  # a failure proves nothing about the engine
        return left
