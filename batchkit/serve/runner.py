"""Running of the batches of one place (``model_places.py``), at the same time, on one engine that stays loaded.

The engine takes requests by the rank of their batch (``execution/shared_engines.py``). A batch of lower rank may be
stopped like an interrupted run: its running requests finish, and it is resumed later. After the engine process has
died, the batches run one at a time for a while, to find the one that caused it.
"""

from __future__ import annotations

import signal
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from batchkit.commands import Say
from batchkit.engines.process.launcher import LOG, log_of
from batchkit.errors import BatchkitError, Interrupted, StoreError
from batchkit.execution.engine_pool import EnginePool
from batchkit.execution.run import start_run
from batchkit.execution.shared_engines import EngineClaim, SharedEngines
from batchkit.execution.start import StartOptions
from batchkit.execution.stop import StopRequest
from batchkit.execution.summary import RunSummary
from batchkit.rendering.held_media import Holders
from batchkit.serve.batch import errors_of, moved, problem, rows_left
from batchkit.serve.clock import wall_s
from batchkit.serve.model_places import ModelPlace
from batchkit.serve.order import MOST, BatchTurn, Order
from batchkit.serve.settings import Settings
from batchkit.serve.store import Object, Store, Stored

_LOOK_S = 0.1
_PAUSE_S = 10.0  # wait after a full disk or a similar error
_ALONE_S = 60.0  # a batch that has run alone this long without a crash may share the engine again
_FOREVER = float("inf")


class Running(NamedTuple):
    stored: Stored
    stop: StopRequest
    claim: EngineClaim


class Runner:
    """A pool of threads that run batches. The lifecycle calls ``look`` regularly to start and stop them.

    The threads live as long as the engine, because the kernel kills an engine process when the thread that started it
    ends.
    """

    def __init__(
        self, settings: Settings, store: Store, say: Say, place: ModelPlace, media_holders: Holders
    ) -> None:
        self._settings, self._store, self._say = settings, store, say
        self._place, self._media_holders = place, media_holders
        self._order = Order()
        log = log_of(settings.folder / LOG, place.name)
        self._engines = SharedEngines(EnginePool(log), self._on_death, place.environment)
        # Guards the running batches and the threads that start and stop them.
        self._lock = threading.Lock()
        self._running: dict[str, Running] = {}
        self._alone: dict[str, float] = {}  # time until which each batch has to run alone
        self._rests_until: dict[str, float] = {}
        # Rows answered by the running batches.
        self._looked_at, self._answered = (time.monotonic(), 0)
        self._closing = threading.Event()
        self._pool = ThreadPoolExecutor(2 * MOST, thread_name_prefix="run")

    @property
    def _most(self) -> int:
        """The maximum number of batches that run at the same time."""
        return 1 if self._place.has_workers else MOST

    def is_running(self, name: str) -> bool:
        with self._lock:
            return name in self._running

    def stop(self, name: str, drain_s: float) -> None:
        """Stop the run of the batch called ``name``, if it is running. Its requests get ``drain_s`` seconds to
        finish."""
        with self._lock:
            if (running := self._running.get(name)) is not None:
                running.stop.ask(signal.SIGTERM, drain_s=drain_s)

    def look(self) -> None:
        """Start the batches that should run now, and stop running batches that should not."""
        with self._lock:
            self._note_rate()
            wanted = {} if self._closing.is_set() else self._wanted()
            for name, running in self._running.items():
                if name in wanted:
                    running.claim.rank = wanted[name].rank
                else:
                    running.stop.ask(signal.SIGTERM, drain_s=_FOREVER)
            if any(name in self._alone for name in (*wanted, *self._running)) and self._running:
                return
            models = {turn.stored.doc["model"] for turn in wanted.values()}
            models |= {running.stored.doc["model"] for running in self._running.values()}
            if len(models) > 1:
                return  # the runs of the loaded model have to end first
            n_active = sum(one.stop.signum is None for one in self._running.values())
            due = [turn for name, turn in wanted.items() if name not in self._running]
            for turn in due[: self._most - n_active]:
                self._begin(turn)

    def stop_all(self, drain_s: float) -> None:
        """Stop all runs permanently: later calls of ``look`` start no runs. Requests get ``drain_s`` seconds to
        finish."""
        self._closing.set()
        for name in [*self._running]:
            self.stop(name, drain_s)

    def close(self) -> None:
        """Wait until all runs have ended, then release the engine. Call ``stop_all`` before."""
        while self._running:
            time.sleep(_LOOK_S)
        self._engines.close()
        self._pool.shutdown()

    def _wanted(self) -> dict[str, BatchTurn]:
        now, clock = wall_s(), time.monotonic()
        in_progress = [
            stored
            for stored in self._store.all("batch", "in_progress")
            if self._place.is_for(stored.doc["model"])
        ]
        waiting = [
            stored
            for stored in in_progress
            if stored.doc["expires_at"] > now
            and self._rests_until.get(stored.doc["id"], 0.0) <= clock
        ]
        names = {stored.doc["id"] for stored in in_progress}
        self._alone = {
            name: until for name, until in self._alone.items() if name in names and until > clock
        }
        if alone := [stored for stored in waiting if stored.doc["id"] in self._alone]:
            waiting = alone
        most = 1 if alone else self._most
        left = {name: running.claim.left for name, running in self._running.items()}
        turns = self._order.chosen(waiting, left, now, most)
        return {turn.stored.doc["id"]: turn for turn in turns}

    def _note_rate(self) -> None:
        now = time.monotonic()
        answered = sum(running.claim.answered for running in self._running.values())
        if self._running:
            self._order.note(answered - self._answered, now - self._looked_at)
        self._looked_at, self._answered = now, answered

    def _on_death(self) -> None:
        """After the engine died, let the batches run one at a time, to find the one that crashed it."""
        with self._lock:
            for name, running in self._running.items():
                self._alone[name] = _FOREVER
                if len(self._running) > 1:
                    running.stop.ask(signal.SIGTERM, drain_s=0)

    def _begin(self, turn: BatchTurn) -> None:
        stored, name = turn.stored, turn.stored.doc["id"]
        if name in self._alone:
            self._alone[name] = time.monotonic() + _ALONE_S
        claim = EngineClaim(stored.owner, turn.rank, rows_left(stored.doc))
        running = Running(stored, StopRequest(), claim)
        self._running[name] = running
        self._pool.submit(self._run, running)

    def _run(self, running: Running) -> None:
        batch, summary = running.stored.doc, None
        error: BatchkitError | None = None
        try:
            job = self._settings.job_of(running.stored)
            options = StartOptions(command="serve", quiet=True, media_holders=self._media_holders)
            engines = self._engines.of(running.claim)
            outcome = start_run(job, options=options, kept=engines, stop=running.stop)
            summary, error = outcome.summary, outcome.error
            if summary.stopped_by is not None:
                error = BatchkitError(f"stopped by {summary.stopped_by}")
        except Interrupted:
            pass
        except BatchkitError as found:
            error = found
        except Exception as found:  # a bug in batchkit must not end the service
            traceback.print_exc()
            error = BatchkitError(f"internal error: {type(found).__name__}: {found}")
        try:
            self._charge(batch, running.claim)
            self._note(batch, summary, error)
        except StoreError as found:
            self._rest(batch, found)
        with self._lock:
            self._answered -= running.claim.answered
            del self._running[batch["id"]]
        self._store.changed.set()  # the batch may have to be ended now

    def _charge(self, batch: Object, claim: EngineClaim) -> None:
        def charged(doc: Object) -> Object:
            return {**doc, "gpu_seconds": round(doc["gpu_seconds"] + spent_s, 3)}

        if (model := self._settings.models.get(batch["model"])) is not None:
            spent_s = claim.engine_s * model.gpus
            self._store.change(batch["id"], charged)

    def _note(self, batch: Object, summary: RunSummary | None, error: BatchkitError | None) -> None:
        """Store how a batch's run stopped. A batch that was cancelled meanwhile keeps the state ``cancelling``."""
        now, name = wall_s(), batch["id"]
        if isinstance(error, StoreError):
            # For example a full disk: no data is lost, and there may be space later.
            self._rest(batch, error)
        elif error is not None:
            self._say(f"{name}: {error}")
            why = errors_of(problem("batch_failed", str(error)))
            self._store.change(name, lambda doc: moved(doc, "finalizing", now, errors=why))
        elif summary is not None:
            counts = {"completed": summary.ok, "failed": summary.failed}
            ended = summary.exit in (0, 3)

            def noted(doc: Object) -> Object:
                doc = {**doc, "request_counts": {**doc["request_counts"], **counts}}
                return (moved(doc, "finalizing", now) if ended else None) or doc

            self._store.change(name, noted)

    def _rest(self, batch: Object, error: Exception) -> None:
        self._say(f"{batch['id']}: {error}; retrying in {_PAUSE_S:.0f} s")
        self._rests_until[batch["id"]] = time.monotonic() + _PAUSE_S
