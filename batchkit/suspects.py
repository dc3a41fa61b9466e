"""Finds the rows that kill an engine, by replaying suspects in halves.

After a death every request in flight is a suspect. They are replayed alone, in two groups; a group
that kills the engine again is split, until the one at fault stands alone. So k poison rows among n
cost at most about k * (log2(n) + 1) restarts, and every other row is answered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from batchkit.types import Request


class Suspects:
    """Groups of requests that have yet to be replayed, each without any other request beside it."""

    def __init__(self) -> None:
        self._groups: deque[list[Request]] = deque()
        self._replaying = False

    def __bool__(self) -> bool:
        """True while a group waits or is being replayed."""
        return self._replaying or bool(self._groups)

    def died(self, in_flight: Sequence[Request]) -> Request | None:
        """The engine died with these in flight. The poison row, if they were one alone; else None.

        A lone request that was not yet replayed may just have been there when something else went
        wrong: it gets its replay.
        """
        if self._replaying and len(in_flight) == 1:
            self._replaying = False
            return in_flight[0]
        self._replaying = False
        half = (len(in_flight) + 1) // 2
        for group in (in_flight[half:], in_flight[:half]):
            if group:
                self._groups.appendleft(list(group))
        return None

    def next_group(self) -> list[Request]:
        """The group to replay now that nothing is in flight; empty when all are cleared."""
        self._replaying = bool(self._groups)
        return self._groups.popleft() if self._groups else []
