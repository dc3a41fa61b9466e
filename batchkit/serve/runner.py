"""Runs batches on an engine that stays loaded, one at a time; a batch that should go first takes the place of another.

The one that gives way stops as an interrupted run does: its requests in flight are finished, and it is continued later.
"""

from __future__ import annotations

import signal
import threading
import time
import traceback
from collections.abc import Callable
from typing import NamedTuple

from batchkit.commands import Say
from batchkit.engines.process.launcher import LOG
from batchkit.errors import BatchkitError, Interrupted, StoreError
from batchkit.execution.lane import KeptEngine
from batchkit.execution.run import start_run
from batchkit.execution.signals import StopRequest
from batchkit.execution.start import Options
from batchkit.execution.summary import RunSummary
from batchkit.serve.batch import errors_of, moved, problem
from batchkit.serve.order import Order
from batchkit.serve.settings import Settings
from batchkit.serve.store import Object, Store, Stored

_LOOK_S = 0.1
_PAUSE_S = 10.0  # after the disk was full, or the like
CANCEL_S = 600.0  # as OpenAI's: answers that have begun get so long
_FOREVER = float("inf")


class Running(NamedTuple):
    stored: Stored
    stop: StopRequest
    began: float


class Runner:
    """Its thread takes the first batch that is ``in_progress``, and runs it until it ends or gives way."""

    def __init__(self, settings: Settings, store: Store, say: Say) -> None:
        self._settings, self._store, self._say = settings, store, say
        self._order, self._kept = Order(), KeptEngine(settings.folder / LOG)
        self._lock = threading.Lock()  # the runner's thread, and those that stop its run
        self._running: Running | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="runner")
        self.start = self._thread.start

    @property
    def running(self) -> str | None:
        """The id of the batch whose run is under way."""
        with self._lock:
            return None if self._running is None else self._running.stored.doc["id"]

    def stop(self, name: str, drain_s: float = CANCEL_S) -> None:
        """End the run of that batch, if it is under way: within ``drain_s`` of its requests in flight."""
        with self._lock:
            if self._running is not None and self._running.stored.doc["id"] == name:
                self._running.stop.ask(signal.SIGTERM, drain_s=drain_s)

    def make_way(self) -> None:
        """Let another batch take the engine if it should go first."""
        with self._lock:
            if self._running is None or self._running.stop.signum is not None:
                return
            name = self._running.stored.doc["id"]
            waiting = self._store.all("batch", "in_progress")
            seconds = time.monotonic() - self._running.began
            first = self._order.first(waiting, time.time(), seconds, name)
            if first is not None and first.doc["id"] != name:
                self._running.stop.ask(signal.SIGTERM, drain_s=_FOREVER)

    def close(self, drain_s: float) -> None:
        """Stop within ``drain_s`` and release the engine."""
        self._closing.set()
        if (name := self.running) is not None:
            self.stop(name, drain_s)
        self._thread.join()
        self._kept.close()

    def _work(self) -> None:
        while not self._closing.is_set():
            if (chosen := self._chosen()) is None:
                self._closing.wait(_LOOK_S)
            else:
                self._run(chosen)

    def _chosen(self) -> Running | None:
        with self._lock:
            try:
                waiting = self._store.all("batch", "in_progress")
            except StoreError as error:
                self._say(str(error))
                return None
            now = time.time()
            waiting = [one for one in waiting if one.doc["expires_at"] > now]
            if (first := self._order.first(waiting, now)) is None:
                return None
            self._running = Running(first, StopRequest(), time.monotonic())
            return self._running

    def _run(self, running: Running) -> None:
        batch, summary = running.stored.doc, None
        error: BatchkitError | None = None
        try:
            job = self._settings.job_of(batch["id"], batch["input_file_id"])
            options = Options(command="serve", quiet=True)
            summary, error = start_run(job, options=options, kept=self._kept, stop=running.stop)
        except Interrupted:
            pass
        except BatchkitError as found:
            error = found
        except Exception as found:  # ours: it must not end the service
            traceback.print_exc()
            error = BatchkitError(f"internal error: {type(found).__name__}: {found}")
        seconds = time.monotonic() - running.began
        try:
            self._note(batch, summary, error)
        except StoreError as found:
            self._pause(found)
        with self._lock:
            n_rows = 0 if summary is None else summary.ok + summary.failed - summary.skipped
            self._order.note(running.stored.owner, seconds, n_rows)
            self._running = None

    def _note(self, batch: Object, summary: RunSummary | None, error: BatchkitError | None) -> None:
        """Write down how the run stopped. A batch that was cancelled meanwhile stays ``cancelling``."""
        now, name = time.time(), batch["id"]
        if isinstance(
            error, StoreError
        ):  # a full disk: nothing is lost, and it may have room later
            self._pause(error)
            return
        if error is not None:
            self._say(f"{name}: {error}")
            why = errors_of(problem("batch_failed", str(error)))
            self._store.change(name, lambda doc: moved(doc, "finalizing", now, errors=why))
        elif summary is not None:
            ended, counts = summary.exit in (0, 3), counts_of_summary(summary)
            self._store.change(name, _noted(ended, counts, now))

    def _pause(self, error: Exception) -> None:
        self._say(f"{error}; tried again in {_PAUSE_S:.0f} s")
        self._closing.wait(_PAUSE_S)


def counts_of_summary(summary: RunSummary) -> Object:
    return {"total": summary.total, "completed": summary.ok, "failed": summary.failed}


def _noted(ended: bool, counts: Object, now: float) -> Callable[[Object], Object | None]:
    def change(batch: Object) -> Object | None:
        total = batch["request_counts"]["total"]
        batch = {**batch, "request_counts": {**counts, "total": total}}
        return (moved(batch, "finalizing", now) if ended else None) or batch

    return change
