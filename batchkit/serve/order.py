"""Which batch goes next: by priority, then those that would miss their deadline, then fair shares among keys.

Within a key's share, the batch with the fewest rows left goes first, so that a short one never waits for a long one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from batchkit.serve.batch import rows_left
from batchkit.serve.store import Stored

SHARE_S = 30.0
"""A key that had the engine for so long lets another go first."""
_SPARE = 1.5  # a deadline is close if the rows left would take two thirds of the time to it


class Order:
    """Seconds of the engine by key, and the rate at which rows are answered. Used under the runner's lock."""

    def __init__(self) -> None:
        self._used_s: dict[str, float] = {}
        self._rows_per_s = 0.0

    def note(self, owner: str, seconds: float, rows: int) -> None:
        """The engine worked for ``owner``."""
        self._used_s[owner] = self._used_s.get(owner, 0.0) + seconds
        if rows and seconds:
            self._rows_per_s = rows / seconds

    def first(
        self, waiting: Sequence[Stored], now: float, running_s: float = 0.0, running: str = ""
    ) -> Stored | None:
        """``running``: the id of the batch that the engine has had for ``running_s``, as yet not noted."""
        self._welcome({stored.owner for stored in waiting})

        def rank(stored: Stored) -> tuple[Any, ...]:
            batch = stored.doc
            used_s = self._used_s[stored.owner]
            if any(stored.owner == one.owner and one.doc["id"] == running for one in waiting):
                used_s += running_s
            left = rows_left(batch)
            is_urgent = batch["expires_at"] - now < _SPARE * left / (self._rows_per_s or 1e9)
            return -batch["priority"], not is_urgent, used_s // SHARE_S, left, batch["expires_at"]

        return min(waiting, key=rank, default=None)

    def _welcome(self, owners: Iterable[str]) -> None:
        """A key that comes, or comes back, begins with what the least of the others has used: it can't save up shares."""
        known = [self._used_s[owner] for owner in owners if owner in self._used_s]
        least = min(known, default=0.0)
        for owner in owners:
            self._used_s.setdefault(owner, least)
        for owner in self._used_s.keys() - owners:
            del self._used_s[owner]
