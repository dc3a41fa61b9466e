"""The life of batches: checks their input files, ends them, and removes expired files and runs."""

from __future__ import annotations

import shutil
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from batchkit.commands import Say
from batchkit.errors import BatchkitError
from batchkit.rendering.held_media import Holders
from batchkit.serve.batch import UNFINISHED, errors_of, moved, problem
from batchkit.serve.checks import CheckedBatch, check_file
from batchkit.serve.clock import wall_s
from batchkit.serve.files import parts_of, remove_file, remove_unknown
from batchkit.serve.finish import Finished, finish
from batchkit.serve.model_places import places_of
from batchkit.serve.runner import Runner
from batchkit.serve.settings import DAY_S, Settings
from batchkit.serve.store import Store, Stored
from batchkit.serve.webhooks import ended_event

_TICK_S = 0.5  # poll interval for deadlines; changes of a batch wake the thread immediately
_EXPIRY_S = 60.0
_AGAIN_S = 10.0
DRAIN_S = 25.0  # less than the 30 s after which Kubernetes kills a process


class Lifecycle:
    """A thread that moves unfinished batches to their next state.

    Two more threads check input files and write results. The runners (``runner.py``) run the batches.
    """

    def __init__(self, settings: Settings, store: Store, say: Say) -> None:
        self._settings, self._store, self._say = settings, store, say
        holders = Holders()  # shared by all runners, because all runs are in this process
        self._runners = [
            Runner(settings, store, say, place, holders) for place in places_of(settings, say)
        ]
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="lifecycle")
        self._doing: dict[str, Future[None]] = {}
        self._closing, self._next_expiry = threading.Event(), 0.0
        self._thread = threading.Thread(target=self._work, name="lifecycle")

    def start(self) -> None:
        remove_unknown(self._store, self._settings)
        self._thread.start()

    def close(self) -> None:
        """Stop the service. Running requests get ``DRAIN_S`` seconds to finish; the next start of the server resumes
        unfinished batches."""
        self._closing.set()
        self._store.changed.set()
        self._thread.join()
        for runner in self._runners:
            runner.stop_all(DRAIN_S)
        for runner in self._runners:
            runner.close()
        self._pool.shutdown(cancel_futures=True)

    def _work(self) -> None:
        while not self._closing.is_set():
            self._store.changed.wait(_TICK_S)
            self._store.changed.clear()
            try:
                self._look()
            except Exception as error:
                self._wait_after(error, "")

    def _look(self) -> None:
        for stored in self._store.all("batch", *UNFINISHED):
            self._advance(stored)
        for runner in self._runners:
            runner.look()
        if time.monotonic() >= self._next_expiry:
            self._next_expiry = time.monotonic() + _EXPIRY_S
            self._remove_expired()

    def _advance(self, stored: Stored) -> None:
        """Move a batch to its next state, if its deadline, its run or a cancellation requires it."""
        batch, now = stored.doc, wall_s()
        name, status = batch["id"], batch["status"]
        is_running = any(runner.is_running(name) for runner in self._runners)
        if status == "validating":
            self._once(stored, self._validate)
        elif status == "cancelling" and is_running:
            self._stop(name)
        elif status == "in_progress" and now >= batch["expires_at"]:
            if is_running:
                self._stop(name)
            else:
                self._store.change(name, lambda doc: moved(doc, "finalizing", now))
        elif status in ("finalizing", "cancelling") and not is_running:
            self._once(stored, self._finish)

    def _stop(self, name: str) -> None:
        for runner in self._runners:
            runner.stop(name, 0)

    def _once(self, stored: Stored, do: Callable[[Stored], None]) -> None:
        """Call ``do`` for the batch in another thread, unless such a call for this batch is still running."""
        self._doing = {name: doing for name, doing in self._doing.items() if not doing.done()}
        if (name := stored.doc["id"]) not in self._doing:
            self._doing[name] = self._pool.submit(self._do, stored, do)

    def _do(self, stored: Stored, do: Callable[[Stored], None]) -> None:
        batch = stored.doc
        try:
            now = self._store.get("batch", batch["id"])
            # Otherwise another thread has just processed it.
            if now is not None and now["status"] == batch["status"]:
                do(stored)
        except Exception as error:
            self._wait_after(error, f"{batch['id']}: {batch['status']}: ")

    def _wait_after(self, error: Exception, what: str) -> None:
        """Report an error, such as a full disk or a bug, and wait before the next try, so that one error never stops
        the service.

        ``what``: what failed, for the message.
        """
        if not isinstance(error, BatchkitError | OSError):
            traceback.print_exc()
        self._say(f"{what}{error}; retrying in {_AGAIN_S:.0f} s")
        self._closing.wait(_AGAIN_S)

    def _validate(self, stored: Stored) -> None:
        batch, most = stored.doc, self._settings.limits_of(stored.owner).rows
        path, name = self._settings.files / batch["input_file_id"], batch["id"]
        try:
            checked = check_file(path, batch["endpoint"], self._settings.models, most)
        except FileNotFoundError:
            text = f"The file {path.name} no longer exists."
            checked = CheckedBatch(0, [problem("file_not_found", text, param="input_file_id")])
        if checked.problems:
            self._end(name, Finished("failed", {"errors": errors_of(*checked.problems)}, ()))
        else:
            counts, now = {"total": checked.rows, "completed": 0, "failed": 0}, wall_s()
            more = {"request_counts": counts, "model": checked.model}
            self._store.change(name, lambda doc: moved(doc, "in_progress", now, **more))
            log = self._settings.runs / name / "run.log"
            self._say(f"{name}: in_progress, {checked.rows:,} rows for {checked.model}; see {log}")

    def _finish(self, stored: Stored) -> None:
        self._end(stored.doc["id"], finish(stored.doc, self._settings))

    def _end(self, name: str, ended: Finished) -> None:
        """Write the batch's final state, its file objects and its webhook event in one transaction."""
        now, status = wall_s(), ended.status
        events = (ended_event(name, status, now),) if self._settings.webhook else ()
        self._store.change(
            name, lambda doc: moved(doc, status, now, **ended.more), adding=(*ended.files, *events)
        )
        self._say(f"{name}: {status}{_in_words(ended)}")

    def _remove_expired(self) -> None:
        now = wall_s()
        in_use = {stored.doc["input_file_id"] for stored in self._store.all("batch", *UNFINISHED)}
        for stored in self._store.expired(now):
            if stored.doc["id"] not in in_use:
                parts = parts_of(self._store, stored.doc["id"])
                remove_file(self._store, self._settings, stored.doc["id"], *parts)
        if self._settings.retention_days:
            self._remove_runs(now - self._settings.retention_days * DAY_S)

    def _remove_runs(self, before: float) -> None:
        """Remove the run folders of ended batches that were created earlier than ``before``."""
        for stored in self._store.all("batch"):
            folder, batch = self._settings.runs / stored.doc["id"], stored.doc
            if (
                batch["created_at"] < before
                and batch["status"] not in UNFINISHED
                and folder.exists()
            ):
                shutil.rmtree(folder)


def _in_words(ended: Finished) -> str:
    if errors := ended.more.get("errors"):
        return f": {errors['data'][0]['message']}"
    counts = ended.more["request_counts"]
    return f", {counts['completed']:,} of {counts['total']:,} rows answered"
