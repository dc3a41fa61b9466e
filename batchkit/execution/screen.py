"""What people and programs see of a run while it works: lines, a bar, ``metrics.jsonl`` and Prometheus."""

from __future__ import annotations

import os
import threading
import time

from batchkit.engines.memory import family_bytes, gpu_loads
from batchkit.execution.events import Load
from batchkit.execution.exporter import Show
from batchkit.execution.progress import Progress
from batchkit.execution.resume import OpenRun
from batchkit.execution.start import Start
from batchkit.execution.tasks import Tasks
from batchkit.storage.metrics import GpuLoad, Metrics, MetricsLog
from batchkit.types import utc_now

_LOOK_S = 0.25
_RECORD_S = 1.0
_MACHINE_S = 5.0  # reading the processes of the host may take some milliseconds


class Screen:
    """Told once a turn how far the run is; nothing depends on it. Used by the run's thread.

    ``began``: when the command did. ``export`` gets each line of the metrics.
    """

    def __init__(self, start: Start, run: OpenRun, began: float, export: Show) -> None:
        job = start.job
        self._run, self._began, self._export = run, began, export
        self._progress = Progress(
            job.folder,
            interval_s=job.run.checkpoint_interval_s,
            quiet=start.options.quiet,
            generates=job.task == "generate",
        )
        self.say, self.note = self._progress.event, self._progress.note
        self.waiting = self._progress.waiting
        self._log = MetricsLog(run.folder, is_lost=lambda: run.lock.is_lost, say=self.say)
        self._machine = _MachineWatch()
        self._look_s = min(_LOOK_S, job.run.checkpoint_interval_s)
        self._next_look = self._next_record = 0.0

    @property
    def is_due(self) -> bool:
        """Very cheap."""
        return time.monotonic() >= self._next_look

    def show(self, tasks: Tasks, load: Load, *, force: bool = False) -> None:
        """Update what is shown; with ``force`` also what is not due yet."""
        now = time.monotonic()
        self._next_look = now + self._look_s
        metrics = self._metrics(tasks, load, now)
        self._progress.update(metrics, force=force)
        if now >= self._next_record or force:
            self._next_record = now + _RECORD_S
            self._log.append(metrics)
            self._export(metrics)

    def close(self) -> None:
        self._machine.close()
        self._log.close()
        self._progress.close()

    def _metrics(self, tasks: Tasks, load: Load, now: float) -> Metrics:
        ledger, manifest, total = self._run.ledger, self._run.manifest, tasks.total()
        return Metrics(
            at=utc_now(),
            start=len(manifest.starts),
            seconds=round(self._log.seconds_before + now - self._began, 3),
            rows_ok=ledger.totals.ok,
            rows_failed=ledger.totals.failed,
            rows_total=None if total is None else total - tasks.elsewhere,
            prompt_tokens=ledger.usage.prompt_tokens,
            completion_tokens=ledger.usage.completion_tokens,
            generations=ledger.steps.spent.generations,
            engine_restarts=manifest.last_start.engine_restarts,
            host_bytes=self._machine.host_bytes,
            gpus=self._machine.gpus,
            **load._replace(kv_cache_usage=round(load.kv_cache_usage, 4))._asdict(),
        )


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
