"""Threads for what rows need: rendering within a limit of decoded pixels, and code that may never end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from batchkit.types import Request

Render = Callable[[], Request | None]


class RenderRoom:
    """No request is begun while ``most_bytes`` of pixels are held by those that were not freed, so the
    limit is exceeded by at most one request for each thread. Used on the event loop's thread, but for ``is_full``.
    """

    def __init__(self, threads: int, most_bytes: int) -> None:
        self._threads = DaemonThreads(threads, "render")
        self._turn, self._freed = asyncio.Semaphore(threads), asyncio.Event()
        self._held_bytes, self._most_bytes = 0, most_bytes

    async def rendered(self, render: Render) -> Request | None:
        async with self._turn:
            while self.is_full:
                self._freed.clear()
                await self._freed.wait()
            request = await asyncio.get_running_loop().run_in_executor(self._threads, render)
            self._held_bytes += 0 if request is None else request.media_bytes
            return request

    def free(self, request: Request) -> None:
        """Its pixels are held no longer."""
        self._held_bytes -= request.media_bytes
        self._freed.set()

    @property
    def is_full(self) -> bool:
        return self._held_bytes >= self._most_bytes

    def close(self) -> None:
        self._threads.shutdown()


class DaemonThreads(ThreadPoolExecutor):
    """As its base, which asyncio insists on; but the process ends without waiting for its threads, whose code
    may never end.

    They are started with the first calls, at most ``most``. A thread that has taken work finishes it.
    """

    def __init__(self, most: int, name: str) -> None:
        super().__init__(most, name)
        self._names = iter([f"{name}-{number}" for number in range(1, most + 1)])
        self._work = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._work.put((future, lambda: fn(*args, **kwargs)))
        if (name := next(self._names, None)) is not None:
            threading.Thread(target=self._run, name=name, daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the threads once they are idle; waits for none."""
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
        self._work.put(None)  # for the next thread
