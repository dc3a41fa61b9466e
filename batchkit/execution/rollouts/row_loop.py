"""The event loop that runs the code of all rows on its own thread, with further threads for blocking work.

It also finds the place in the user's code where an error or a block occurred.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from batchkit.execution.rollouts.open_row import OpenRow
from batchkit.rendering.held_media import HeldMedia
from batchkit.types import Request

_LOOK_S = 1.0
_CLOSE_S = 5.0
_SIDE_THREADS = 32  # for asyncio.to_thread
# Frames of these folders are left out of stacks that users see.
_OURS = (str(Path(__file__).parent), str(Path(asyncio.__file__).parent))
_MOST_FRAMES = 12
_MOST_CHARACTERS = 10_000

_ROW: ContextVar[OpenRow | None] = ContextVar("row", default=None)


class RowLoop:
    """An event loop on its own thread, which runs the rows' code.

    Threads: the loop's thread runs the rows' code, ``fail``, ``look`` and functions passed to ``soon``. Another thread
    calls the methods; ``start`` is called on the loop's thread.

    - ``fail``: called with an exception that was raised outside of a row's own code.
    - ``look``: called once a second, to end rows that take too long.
    """

    def __init__(self, fail: Callable[[BaseException], None], look: Callable[[], None]) -> None:
        self._fail, self._look = fail, look
        self._beat = self._looked_at = time.monotonic()
        self._late_looks = 0
        self._closing = False
        self._loop = asyncio.new_event_loop()
        # asyncio keeps only weak references to tasks. If the garbage collector closed a task that swallows
        # every error, the collecting thread would hang.
        self._tasks = set[RowTask]()
        self._loop.set_task_factory(self._task)
        self._loop.set_default_executor(DaemonThreads(_SIDE_THREADS, "rollout"))
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
        self._thread.start()

    def start(self, row: OpenRow, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run ``coroutine`` as the code of ``row``. Call it on the loop's thread."""
        token = _ROW.set(row)
        row.coroutine = self._loop.create_task(coroutine)
        _ROW.reset(token)

    def soon(self, do: Callable[..., None], *args: Any) -> None:
        """Call ``do`` on the loop's thread; an error in it stops the run."""

        def guarded() -> None:
            try:
                do(*args)
            except BaseException as error:
                self._fail(error)

        with suppress(RuntimeError):  # closed already
            self._loop.call_soon_threadsafe(guarded)

    def check_blocked(self, limit_s: float) -> bool:
        """Return whether some code has run for ``limit_s`` without an ``await``.

        The loop must be late in two checks, one second apart: after a pause of the whole process, it is late only in
        one.
        """
        now = time.monotonic()
        if now >= self._looked_at + _LOOK_S:
            self._looked_at = now
            self._late_looks = self._late_looks + 1 if now - self._beat > limit_s + _LOOK_S else 0
        return self._late_looks >= 2

    @property
    def running(self) -> tuple[OpenRow | None, str]:
        """The row whose code runs now (None for a callback), and the stack of that code."""
        where = shown_code(self._thread)
        task = asyncio.current_task(self._loop)
        return task.row if isinstance(task, RowTask) else None, where

    def close(self) -> None:
        """Cancel all code, without waiting for code that blocks or swallows its cancellation."""
        self.soon(self._stop)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(self._tick)
        while not self._closing:  # the user's code may have stopped the loop
            with suppress(SystemExit, KeyboardInterrupt):  # the task that raised it also stores it
                self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> RowTask:
        task = RowTask(coroutine, loop=loop, **options)
        task.row = _ROW.get()
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _tick(self) -> None:
        self._beat = time.monotonic()
        self.soon(self._look)
        self._loop.call_later(_LOOK_S, self._tick)

    def _stop(self) -> None:
        """Cancel every coroutine, then stop the loop."""
        self._closing = True
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        ended = asyncio.gather(*tasks, return_exceptions=True)
        ended.add_done_callback(lambda _: self._loop.stop())


class RowTask(asyncio.Task[Any]):
    """An asyncio task that knows the row whose code started it."""

    row: OpenRow | None = None


Render = Callable[[], Request | None]


class RenderRoom:
    """Threads that render requests, limited by the memory for media.

    No rendering begins while ``held``, which counts the decoded media in memory, is full. Use it on the event loop's
    thread; any thread may read ``is_full``.
    """

    def __init__(self, threads: int, held: HeldMedia) -> None:
        self._threads = DaemonThreads(threads, "render")
        self._turn, self._freed = asyncio.Semaphore(threads), asyncio.Event()
        self._held = held

    async def rendered(self, render: Render) -> Request | None:
        async with self._turn:
            while self.is_full:
                self._freed.clear()
                await self._freed.wait()
            self._held.begin()
            request = None
            try:
                request = await asyncio.get_running_loop().run_in_executor(self._threads, render)
            finally:
                self._held.end(0 if request is None else request.media_bytes)
            return request

    def free(self, request: Request) -> None:
        """Subtract the decoded media of ``request`` from the memory in use."""
        self._held.free(request.media_bytes)
        self._freed.set()

    @property
    def is_full(self) -> bool:
        return self._held.is_full

    def close(self) -> None:
        self._threads.shutdown()
        self._held.close()


class DaemonThreads(ThreadPoolExecutor):
    """A ThreadPoolExecutor (asyncio requires one) whose threads don't keep the process alive.

    This matters because the user's code on these threads may never end. At most ``most`` threads are started, one with
    each of the first calls. A thread finishes the work that it has begun.
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
        """End the threads once they are idle, without waiting for them."""
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


def shown_error(error: BaseException) -> str:
    shown = traceback.TracebackException.from_exception(error)
    _cut(shown)
    text = "".join(shown.format()).strip()
    return text if len(text) <= _MOST_CHARACTERS else f"…{text[-_MOST_CHARACTERS:]}"


def shown_code(thread: threading.Thread) -> str:
    """Return the stack of ``thread``, without batchkit's and asyncio's own frames."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return "(it has ended)"
    return "".join(_users(traceback.extract_stack(frame)).format()).rstrip()


def _cut(shown: traceback.TracebackException) -> None:
    shown.stack = _users(shown.stack)
    for part in (shown.__cause__, shown.__context__, *(shown.exceptions or ())):
        if part is not None:
            _cut(part)


def _users(stack: traceback.StackSummary) -> traceback.StackSummary:
    frames = [frame for frame in stack if not frame.filename.startswith(_OURS)]
    return traceback.StackSummary.from_list(frames[-_MOST_FRAMES:])
