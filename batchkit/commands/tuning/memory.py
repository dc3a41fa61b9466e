"""The peak memory of an engine: on the GPUs if any answers, else on the host."""

from __future__ import annotations

import threading
from typing import Literal, NamedTuple

from batchkit.engines.memory import family_bytes, gpu_bytes

INTERVAL_S = 0.5
_LEAST_GPU_BYTES = 64 * 2**20  # less than a CUDA context: the engine runs on the host


class Memory(NamedTuple):
    """In units of 2**30 bytes, as nvidia-smi and ``run.max_host_gb`` count them."""

    gb: float
    of: Literal["gpu", "host"]


class MemoryMeter:
    """Start it before the engine is opened: memory in use on the GPUs then is not the engine's.

    Threads: one of ours samples twice a second, since asking a driver may take long; the trial's
    thread calls the methods. They share ``_pid`` and the two peaks.
    """

    def __init__(self) -> None:
        self._gpu_before = gpu_bytes()
        self._gpu_peak = self._host_peak = 0
        self._pid: int | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._look, name="memory-meter", daemon=True)
        self._thread.start()

    def follow(self, pid: int | None) -> None:
        """Set the engine's process, if it has its own; samples once now, as it may end soon."""
        if pid is not None:
            self._host_peak = family_bytes(pid)
        self._pid = pid

    def close(self) -> Memory | None:
        """Stop and return the peak; None if unknown. May be called twice."""
        self._closing.set()
        self._thread.join(timeout=10)
        if self._gpu_peak >= _LEAST_GPU_BYTES:
            return Memory(self._gpu_peak / 2**30, "gpu")
        return Memory(self._host_peak / 2**30, "host") if self._host_peak else None

    def _look(self) -> None:
        while True:
            is_last = self._closing.wait(INTERVAL_S)
            if self._gpu_before is not None and (now := gpu_bytes()) is not None:
                self._gpu_peak = max(self._gpu_peak, now - self._gpu_before)
            if self._pid is not None:
                self._host_peak = max(self._host_peak, family_bytes(self._pid))
            if is_last:
                return
