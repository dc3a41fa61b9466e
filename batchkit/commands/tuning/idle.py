"""What the engine waited for: rendered rows, its own preparation, or its KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from batchkit.engines.base import EngineLoad
from batchkit.execution.window import KV_CACHE_FULL

LEAST_S = 0.5


@dataclass(frozen=True, slots=True)
class Idle:
    """Shares of the steady time, 0 to 1; ``running`` is how many requests ran at once on average.

    ``rendering``: the engine had free slots, and no rendered row was ready. ``preparing``: it had
    free slots and enough rows, but was still tokenising them or preprocessing their images.
    ``kv_cache``: no free slot, because the KV cache was full.
    """

    rendering: float
    preparing: float
    kv_cache: float
    running: float
    preempted: int


class IdleMeter:
    """Adds up time by what the engine is waiting for."""

    def __init__(self) -> None:
        self._total_s = self._rendering_s = self._preparing_s = self._kv_cache_s = 0.0
        self._running = 0.0
        self._preempted = 0

    def add(self, seconds: float, load: EngineLoad, in_flight: int, window: int, most: int) -> None:
        """Add ``seconds`` with ``in_flight`` requests in an engine that runs ``most`` at once: all
        that were rendered and fit into ``window``. ``load`` is the engine's last report."""
        self._total_s += seconds
        self._running += seconds * load.running
        self._preempted += load.preempted
        if load.kv_cache_usage >= KV_CACHE_FULL:
            self._kv_cache_s += seconds
        elif window <= most:  # it never has a queue, and rarely reports how many run
            self._rendering_s += seconds * (in_flight < window)
        elif load.waiting == 0 and load.running < most:
            if in_flight < window:
                self._rendering_s += seconds
            else:
                self._preparing_s += seconds

    def read(self) -> Idle | None:
        """None if the steady time was too short to judge."""
        if self._total_s < LEAST_S:
            return None
        return Idle(
            self._rendering_s / self._total_s,
            self._preparing_s / self._total_s,
            self._kv_cache_s / self._total_s,
            self._running / self._total_s,
            self._preempted,
        )
