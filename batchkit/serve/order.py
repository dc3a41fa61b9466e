"""The order in which batches run.

The rank of a batch is its priority; among batches of equal priority, those close to their deadline rank first. Among
batches of equal rank, all API keys get equal shares of the engine (``execution/shared_engines.py``). Among batches of
equal rank and one API key, the one with the fewest rows left runs first, so a short batch never waits for a long one.

If several models share one place (``model_places.py``), one of them is loaded at a time. The loaded model is replaced
when no batch needs it, or when a batch of a better rank needs another model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from batchkit.serve.batch import rows_left
from batchkit.serve.store import Object, Stored

MOST = 32
"""Maximum number of batches that run at the same time."""
_SPARE = 1.5  # a deadline is close if the rows left would take two thirds of the time until then
_LOAD_S = 300.0  # time subtracted from each deadline if another model may have to be loaded first
_HALF_S = 60.0  # half-life of the measured rate


class BatchTurn(NamedTuple):
    """A batch that should run now.

    ``rank``: the negative priority of the batch, then 0 if its deadline is close, otherwise 1. The lowest rank runs
    first.
    """

    rank: tuple[int, int]
    stored: Stored


class Order:
    """The scheduler for the batches of one place. Call it only under the runner's lock.

    It knows the loaded model, and measures how fast rows are answered, to see which deadlines are close.
    """

    def __init__(self) -> None:
        self._rows = self._seconds = 0.0
        self._model = ""

    def note(self, rows: int, seconds: float) -> None:
        """Record that the engine answered ``rows`` rows in ``seconds``; older measurements count less and less."""
        kept = 0.5 ** (seconds / _HALF_S)
        self._rows, self._seconds = kept * self._rows + rows, kept * self._seconds + seconds

    def chosen(
        self, waiting: Sequence[Stored], left: Mapping[str, int], now: float, most: int
    ) -> list[BatchTurn]:
        """Return the batches that should run now, at most ``most``.

        - ``waiting``: all unfinished batches of this place.
        - ``left``: number of rows left by batch id, for batches that already run.
        """
        has_several = len({stored.doc["model"] for stored in waiting}) > 1
        by = now + _LOAD_S if has_several else now
        turns = self._of_one_model(
            [
                BatchTurn(self._rank(stored.doc, left.get(stored.doc["id"]), by), stored)
                for stored in waiting
            ]
        )
        owners = {turn.stored.owner for turn in turns}
        most_of_key = max(1, most // max(1, len(owners)))
        of_key, found = Counter[str](), list[BatchTurn]()
        for turn in sorted(turns, key=_place):
            if of_key[turn.stored.owner] < most_of_key and len(found) < most:
                of_key[turn.stored.owner] += 1
                found.append(turn)
        return found

    def _of_one_model(self, turns: list[BatchTurn]) -> list[BatchTurn]:
        """Return the batches of the loaded model. If a batch of a better rank needs another model, first switch to that
        model."""
        if turns:
            first = min(turns, key=_place)
            ranks = (turn.rank for turn in turns if turn.stored.doc["model"] == self._model)
            if min(ranks, default=None) != first.rank:
                self._model = first.stored.doc["model"]
        return [turn for turn in turns if turn.stored.doc["model"] == self._model]

    def _rank(self, batch: Object, left: int | None, now: float) -> tuple[int, int]:
        rows, left_s = rows_left(batch) if left is None else left, batch["expires_at"] - now
        # Is the time left shorter than _SPARE * rows / rate? Without a division, because the rate may be 0.
        is_close = left_s < 0 or left_s * self._rows < _SPARE * rows * self._seconds
        return -batch["priority"], 0 if is_close else 1


def _place(turn: BatchTurn) -> tuple[Any, ...]:
    batch = turn.stored.doc
    return turn.rank, rows_left(batch), batch["expires_at"], batch["id"]
