"""What the engine waited for while it was fed: rendered rows, its own preparation, or its KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from batchkit.engines.base import EngineLoad
from batchkit.execution.window import KV_CACHE_FULL

LEAST_S = 0.5


@dataclass(frozen=True, slots=True)
class Idle:
    """Shares of the steady time, 0 to 1; ``running`` is how many requests ran at once on average.

    ``rendering``: the engine had places to fill, and no row was rendered yet. ``preparing``: it had
    places and had been given the rows, but was still tokenising them or preprocessing their images.
    ``kv_cache``: no place, for the KV cache was full.
    """

    rendering: float
    preparing: float
    kv_cache: float
    running: float
    preempted: int


class IdleMeter:
    """Adds up time by what the engine lacks in it."""

    def __init__(self) -> None:
        self._total_s = self._rendering_s = self._preparing_s = self._kv_cache_s = 0.0
        self._running = 0.0
        self._preempted = 0

    def add(self, seconds: float, load: EngineLoad, in_flight: int, window: int, most: int) -> None:
        """``seconds`` passed with ``in_flight`` requests handed to an engine that runs ``most`` at once,
        all that were rendered and that ``window`` had room for; ``load`` is what it said last."""
        self._total_s += seconds
        self._running += seconds * load.running
        self._preempted += load.preempted
        if load.kv_cache_usage >= KV_CACHE_FULL:
            self._kv_cache_s += seconds
        elif window <= most:  # it never has a queue, and says too seldom how many run
            self._rendering_s += seconds * (in_flight < window)
        elif load.waiting == 0 and load.running < most:
            if in_flight < window:
                self._rendering_s += seconds
            else:
                self._preparing_s += seconds

    def read(self) -> Idle | None:
        """None where the feed was steady for too short a time to tell."""
        if self._total_s < LEAST_S:
            return None
        return Idle(
            self._rendering_s / self._total_s,
            self._preparing_s / self._total_s,
            self._kv_cache_s / self._total_s,
            self._running / self._total_s,
            self._preempted,
        )
