"""The limit on decoded media in memory, shared by the runs of one process."""

from __future__ import annotations

Holders = set[object]
"""The runs of one process that hold decoded media now."""


class HeldMedia:
    """A count of the bytes of decoded media that one run holds, from rendering a row to writing its record.

    The runs in ``holders`` share ``max_bytes`` equally. The size of a row that is being rendered is unknown; the
    estimate is the size of the row rendered last. A run that holds nothing may always begin one row, because otherwise
    runs could wait for each other forever. Not thread-safe: the caller holds a lock.
    """

    def __init__(self, max_bytes: int, holders: Holders | None = None) -> None:
        self._max_bytes = max_bytes
        self._holders = Holders() if holders is None else holders
        self._held_bytes = self._newest_bytes = self._n_begun = 0

    @property
    def is_full(self) -> bool:
        n_runs = len(self._holders) + (self not in self._holders)
        expected = self._held_bytes + self._newest_bytes * self._n_begun
        return expected > 0 and expected >= self._max_bytes // n_runs

    def begin(self) -> None:
        """Count a row that is about to be rendered, with an estimate of its size."""
        self._n_begun += 1

    def end(self, n_bytes: int) -> None:
        """Replace the estimate for a row that was rendered with its real size ``n_bytes``."""
        self._n_begun -= 1
        self._newest_bytes = n_bytes
        self.free(-n_bytes)

    def free(self, n_bytes: int) -> None:
        self._held_bytes -= n_bytes
        (self._holders.add if self._held_bytes else self._holders.discard)(self)

    def close(self) -> None:
        """Stop counting for this run. The other runs in ``holders`` then share the limit without it."""
        self._holders.discard(self)
        # A later ``free`` or ``end`` must not add this run to the shared set again.
        self._holders = Holders()
