"""The search for the row that kills an engine, among the requests of one supervised engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from batchkit.execution.bisection import Suspects
from batchkit.types import Completion, Request


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
