"""Which batches run: those of the highest priority, and of them those that would miss their deadline, then fair shares
among keys. Of one key the batch with the fewest rows left goes first, so that a short one never waits for a long one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from batchkit.serve.batch import rows_left
from batchkit.serve.store import Stored

MOST = 8
"""So many batches run at once: more keys take turns."""
_OF_ONE_KEY = 2  # the second keeps the engine busy while the first one ends
SHARE_S = 30.0
"""A key that had the engine for so long lets another go first."""
_SPARE = 1.5  # a deadline is close if the rows left would take two thirds of the time to it


class Order:
    """Seconds of the engine by key, and the rate at which rows are answered. Used under the runner's lock."""

    def __init__(self) -> None:
        self._used_s: dict[str, float] = {}
        self._rows_per_s = float("inf")

    def note_use(self, owners: Sequence[str], seconds: float) -> None:
        """The engine has worked for runs of ``owners``."""
        for owner in owners:
            self._used_s[owner] = self._used_s.get(owner, 0.0) + seconds / len(owners)

    def note_rate(self, rows: int, seconds: float) -> None:
        if rows > 0 and seconds > 0:
            self._rows_per_s = rows / seconds

    def chosen(self, waiting: Sequence[Stored], now: float, most: int) -> list[Stored]:
        """Those that run now, at most so many."""
        if not waiting:
            return []
        highest = max(stored.doc["priority"] for stored in waiting)
        first = [stored for stored in waiting if stored.doc["priority"] == highest]
        owners = {stored.owner for stored in waiting}
        self._welcome(owners)
        of_key, found = Counter[str](), list[Stored]()
        most_of_key = _OF_ONE_KEY if len(owners) == 1 else 1
        for stored in sorted(first, key=lambda one: self._rank(one, now)):
            if of_key[stored.owner] < most_of_key and len(found) < most:
                of_key[stored.owner] += 1
                found.append(stored)
        return found

    def _rank(self, stored: Stored, now: float) -> tuple[Any, ...]:
        batch, left = stored.doc, rows_left(stored.doc)
        is_urgent = batch["expires_at"] - now < _SPARE * left / self._rows_per_s
        used = self._used_s[stored.owner] // SHARE_S
        return not is_urgent, used, left, batch["expires_at"], batch["id"]

    def _welcome(self, owners: Collection[str]) -> None:
        """A key that comes, or comes back, begins with what the least of the others has used: it can't save up shares."""
        known = [self._used_s[owner] for owner in owners if owner in self._used_s]
        least = min(known, default=0.0)
        self._used_s = {owner: self._used_s.get(owner, least) for owner in owners}
