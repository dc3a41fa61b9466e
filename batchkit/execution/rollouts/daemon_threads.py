"""Threads for code that may never end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any


class DaemonThreads(ThreadPoolExecutor):
    """As its base, which asyncio insists on; but the process ends without waiting for its threads.

    They are started as they are needed, at most ``most``. A thread that has taken work finishes it.
    """

    def __init__(self, most: int, name: str) -> None:
        super().__init__(most, name)
        self._most, self._name = most, name
        self._work = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]()
        self._idle = threading.Semaphore(0)
        self._started = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._work.put((future, lambda: fn(*args, **kwargs)))
        if self._started < self._most and not self._idle.acquire(blocking=False):
            self._started += 1
            name = f"{self._name}-{self._started}"
            threading.Thread(target=self._run, name=name, daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the threads once they are idle; waits for none."""
        for _ in range(self._started):
            self._work.put(None)

    def _run(self) -> None:
        while (taken := self._work.get()) is not None:
            future, do = taken
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(do())
                except BaseException as error:
                    future.set_exception(error)
            del taken, future, do
            self._idle.release()
