"""Looks at a run once a second, for ``metrics.jsonl`` and for Prometheus."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

from batchkit.engines.memory import family_bytes, gpu_loads
from batchkit.execution.events import PoolLoad
from batchkit.execution.exporter import Show
from batchkit.execution.progress import State
from batchkit.execution.resume import OpenRun
from batchkit.storage.manifest import WorkerState
from batchkit.storage.metrics import GpuLoad, Metrics, MetricsLog
from batchkit.types import utc_now

INTERVAL_S = 1.0
_MACHINE_S = 5.0  # reading the processes of the host may take some milliseconds


class Pool(Protocol):
    """What a worker pool says of its work."""

    @property
    def load(self) -> PoolLoad: ...

    @property
    def retried(self) -> int: ...

    @property
    def in_flight(self) -> int: ...

    @property
    def unfinished_tokens(self) -> int: ...

    def workers(self) -> list[WorkerState]: ...


class Recorder:
    """One for each start; the run's thread calls it. ``show`` gets each look, too."""

    def __init__(
        self,
        run: OpenRun,
        began: float,
        say: Callable[[str], None],
        show: Show,
    ) -> None:
        self._run, self._began, self._show = run, began, show
        self._log = MetricsLog(run.folder, is_lost=lambda: run.lock.is_lost, say=say)
        self._machine = _MachineWatch()
        self._next_look = 0.0

    def update(self, state: State, pool: Pool, *, force: bool = False) -> None:
        """Write a line if one is due; very cheap otherwise."""
        now = time.monotonic()
        if now < self._next_look and not force:
            return
        self._next_look = now + INTERVAL_S
        totals, load, manifest = self._run.ledger.totals, pool.load, self._run.manifest
        metrics = Metrics(
            at=utc_now(),
            start=len(manifest.starts),
            seconds=round(self._log.seconds_before + now - self._began, 3),
            rows_ok=state.ok,
            rows_failed=state.failed,
            rows_total=state.total,
            prompt_tokens=totals.prompt_tokens,
            completion_tokens=totals.completion_tokens,
            unfinished_tokens=state.unfinished_tokens,
            generations=state.generations,
            retried=pool.retried,
            in_flight=state.in_flight,
            window=load.window,
            running=load.running,
            waiting=load.waiting,
            kv_cache_usage=round(load.kv_cache_usage, 4),
            preemptions=load.preemptions,
            engine_restarts=manifest.last_start.engine_restarts,
            host_bytes=self._machine.host_bytes,
            gpus=self._machine.gpus,
        )
        self._log.append(metrics)
        self._show(metrics)

    def close(self) -> None:
        self._machine.close()
        self._log.close()


class _MachineWatch:
    """Reads memory and GPUs on a thread of its own, since a driver may take its time; the run's
    thread reads the two attributes, each of which is replaced as a whole."""

    def __init__(self) -> None:
        self.host_bytes: int | None = None
        self.gpus: list[GpuLoad] = []
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="machine-watch", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while True:
            self.host_bytes = family_bytes(os.getpid()) or None
            self.gpus = gpu_loads()
            if self._closed.wait(_MACHINE_S):
                return
