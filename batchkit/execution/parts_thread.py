"""The thread that writes finished rows to the folders in ``output.export`` during the run.

The main loop never waits for it, and it reads only records that survive a power cut, and with ``output.store`` the loss of
the machine. Otherwise a later start could compute rows again that are already in a part. A folder that can't be reached is
tried again after ``output.export_every_s``. If its last parts can't be written at the end of the run, the start ends with
exit code 1, and the next start writes them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from importlib import import_module

from batchkit.config.numbers import duration
from batchkit.errors import BatchkitError, UploadError
from batchkit.execution.resume import OpenRun
from batchkit.execution.screen import Screen
from batchkit.execution.start import Start
from batchkit.execution.summary import Outcome
from batchkit.runs.parts import PartsFolder, Written
from batchkit.storage.log import RESULTS

_PATIENCE_S = 5.0  # for an upload in progress when a signal ends the run
_STORE_S = 60.0  # for the end of the log to reach ``output.store``


class PartsThread:
    """Writes parts during one start. The run's thread calls the methods.

    Raises:
        JobError: a folder has parts of something else.
    """

    def __init__(self, start: Start, run: OpenRun, screen: Screen) -> None:
        self._run, self._screen = run, screen
        self._every_s = start.job.output.export_every_s
        self._folders = [PartsFolder(run.folder, place) for place in start.options.parts]
        self._said = deque[str]()
        self._closed = threading.Event()
        for folder in self._folders:
            try:
                with screen.waiting(f"reading {folder.name}"):
                    folder.check()
            except UploadError as error:  # it may be reachable later
                screen.say(str(error))
        self._thread = threading.Thread(target=self._write, name="parts", daemon=True)
        if self._folders and self._every_s:
            self._thread.start()

    def messages(self) -> Iterator[str]:
        """Yield the messages of the thread since the last call."""
        while self._said:
            yield self._said.popleft()

    def finished(self, outcome: Outcome) -> Outcome:
        """End the thread, and write the rows that have no part yet. Return the outcome with the errors of this.

        After a signal, the rows are left to the next start.
        """
        unsent = list[BatchkitError]()
        if self._folders:
            with self._screen.waiting("writing the last parts"):
                unsent += self._end(outcome)
        for text in self.messages():
            self._screen.say(text)
        return outcome._replace(unsent=unsent)

    def _end(self, outcome: Outcome) -> Iterator[BatchkitError]:
        exit_code = outcome.summary.exit
        if exit_code >= 128:
            self.close(_PATIENCE_S)
            return
        self.close(None)
        is_complete = outcome.error is None and exit_code in (0, 3)
        if is_complete and not self._is_in_store():
            is_complete = False
            yield UploadError(
                "output.export: the newest rows have no part yet, because output.store can't be reached; the same command"
                " again writes them"
            )
        for folder in self._folders:
            try:
                end = self._safe_end()
                written = folder.finish(end) if is_complete else folder.write(end)
                self._said.append(_line(folder, written))
            except BatchkitError as error:
                yield error

    def _safe_end(self) -> int:
        """Return the end of the records that this run can't lose any more."""
        mirror, end = self._run.mirror, self._run.ledger.synced_end
        return end if mirror is None else min(end, mirror.sealed_end(RESULTS))

    def _is_in_store(self) -> bool:
        """Wait until the store has the whole log. Return False if that takes too long. Without a store, return True."""
        if (mirror := self._run.mirror) is not None:
            mirror.offer(self._run.ledger.ends)
        deadline = time.monotonic() + _STORE_S
        while self._safe_end() < self._run.ledger.synced_end:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def close(self, timeout_s: float | None = 0.0) -> None:
        """End the thread. ``timeout_s``: how long to wait for an upload in progress; None waits until it ends."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _write(self) -> None:
        import_module("batchkit.runs.parquet")  # takes a second, in which the model is loaded
        while not self._closed.wait(self._every_s):
            for folder in self._folders:
                try:
                    folder.write(self._safe_end())
                except BatchkitError as error:
                    self._said.append(f"{error}; next attempt in {duration(self._every_s)}")


def _line(folder: PartsFolder, written: Written) -> str:
    failed = f", {written.failed:,} rows in failed.parquet" if written.failed else ""
    return f"{folder.name}: {written.rows:,} rows in {written.parts:,} parts{failed}"
