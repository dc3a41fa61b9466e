"""How fast counts grow, over the recent past."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

_LEAST_S = 1e-3


class RateMeter:
    """Over the last ``span_s`` seconds, by samples at least ``spacing_s`` apart. A count that went
    back (an engine died with unfinished answers) does not grow.

    The caller has the clock: ``now`` never goes back.
    """

    def __init__(
        self, now: float, counts: Sequence[int], *, span_s: float, spacing_s: float = 0.0
    ) -> None:
        self._span_s, self._spacing_s = span_s, spacing_s
        self._samples = deque([(now, counts)])

    def add(self, now: float, counts: Sequence[int]) -> None:
        if now - self._samples[-1][0] >= self._spacing_s:
            self._samples.append((now, counts))
        while len(self._samples) > 2 and now - self._samples[1][0] >= self._span_s:
            self._samples.popleft()

    def per_s(self, now: float, counts: Sequence[int]) -> list[float]:
        since, before = self._samples[0]
        seconds = max(now - since, _LEAST_S)
        return [max(0, n - then) / seconds for n, then in zip(counts, before, strict=True)]
