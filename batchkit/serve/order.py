"""Whose rows go first: those of a higher priority, and of them those that would miss their deadline.

Keys whose batches have one rank have equal parts of the engine at any time (``execution/shared.py``). Of one key the batch with
the fewest rows left goes first, so that a short one never waits for a long one. Of several models one is loaded, until nobody
asks for it or a batch of a lower rank asks for another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from batchkit.serve.batch import rows_left
from batchkit.serve.store import Object, Stored

MOST = 32
"""So many batches run at once: others wait until one has ended, or has more rows left than they."""
_SPARE = 1.5  # a deadline is close if the rows left would take two thirds of the time to it
_LOAD_S = 300.0  # so much closer is a deadline if another model may have to be loaded first
_HALF_S = 60.0  # of the rate's weight


class Turn(NamedTuple):
    """A batch that is to run; the lowest ``rank`` goes first."""

    rank: tuple[int, int]
    stored: Stored


class Order:
    """Knows the rate at which rows are answered, and the model that is loaded. Used under the runner's lock."""

    def __init__(self) -> None:
        self._rows = self._seconds = 0.0
        self._model = ""

    def note(self, rows: int, seconds: float) -> None:
        """The engine has answered ``rows`` in that time."""
        kept = 0.5 ** (seconds / _HALF_S)
        self._rows, self._seconds = kept * self._rows + rows, kept * self._seconds + seconds

    def chosen(
        self, waiting: Sequence[Stored], left: Mapping[str, int], now: float, most: int
    ) -> list[Turn]:
        """Those that run now, at most so many. ``left``: rows of those that run already."""
        has_several = len({stored.doc["model"] for stored in waiting}) > 1
        by = now + _LOAD_S if has_several else now
        turns = self._of_one_model(
            [
                Turn(self._rank(stored.doc, left.get(stored.doc["id"]), by), stored)
                for stored in waiting
            ]
        )
        owners = {turn.stored.owner for turn in turns}
        most_of_key = max(1, most // max(1, len(owners)))
        of_key, found = Counter[str](), list[Turn]()
        for turn in sorted(turns, key=_place):
            if of_key[turn.stored.owner] < most_of_key and len(found) < most:
                of_key[turn.stored.owner] += 1
                found.append(turn)
        return found

    def _of_one_model(self, turns: list[Turn]) -> list[Turn]:
        """Those of the model that is loaded; of another one if it has none, or none in so high a rank."""
        if turns:
            first = min(turns, key=_place)
            ranks = (turn.rank for turn in turns if turn.stored.doc["model"] == self._model)
            if min(ranks, default=None) != first.rank:
                self._model = first.stored.doc["model"]
        return [turn for turn in turns if turn.stored.doc["model"] == self._model]

    def _rank(self, batch: Object, left: int | None, now: float) -> tuple[int, int]:
        rows, left_s = rows_left(batch) if left is None else left, batch["expires_at"] - now
        is_close = left_s < 0 or left_s * self._rows < _SPARE * rows * self._seconds
        return -batch["priority"], 0 if is_close else 1


def _place(turn: Turn) -> tuple[Any, ...]:
    batch = turn.stored.doc
    return turn.rank, rows_left(batch), batch["expires_at"], batch["id"]
