"""SIGINT and SIGTERM: which signal was received, and when the run must have stopped.

While rows are in flight a signal only sets a flag, which the processor's loop reads; before and
after, there is nothing to drain, and the handler raises Interrupted at once.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from batchkit.errors import Interrupted

DRAIN_S = 10.0


class StopRequest:
    """The first SIGINT allows ``drain_s`` to finish what is in flight; a second, or SIGTERM, none."""

    def __init__(self, *, drain_s: float = DRAIN_S) -> None:
        self._drain_s = drain_s
        self.began = time.monotonic()
        """When the command began: ``run.max_seconds`` counts from then."""
        self.signum: int | None = None
        self._deadline = float("inf")
        self._deferred = False

    def ask(self, signum: int, *, drain_s: float) -> None:
        """Stop within ``drain_s`` seconds; of two requests, the earlier deadline counts."""
        self.signum = self.signum or signum
        self._deadline = min(self._deadline, time.monotonic() + drain_s)

    @property
    def is_due(self) -> bool:
        """True once the deadline has passed."""
        return time.monotonic() >= self._deadline

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside this block signals set a flag and don't raise."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    @contextmanager
    def immediate(self) -> Iterator[None]:
        """Inside this block signals raise, even within ``deferred``; so does an earlier signal."""
        before, self._deferred = self._deferred, False
        try:
            if self.signum is not None:
                raise Interrupted(self.signum)
            yield
        finally:
            self._deferred = before

    @contextmanager
    def installed(self) -> Iterator[StopRequest]:
        """Handle both signals; does nothing outside the main thread, where Python allows none."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before: dict[int, Any] = {
            signum: signal.signal(signum, self._on_signal)
            for signum in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield self
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        first = self.signum is None
        if not first:  # a loop that hangs reads no flag: the next signal ends the process
            signal.signal(signum, signal.SIG_DFL)
        self.ask(signum, drain_s=self._drain_s if first and signum == signal.SIGINT else 0.0)
        if not self._deferred:
            raise Interrupted(signum)
