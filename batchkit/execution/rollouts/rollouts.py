"""The rows that are begun: coroutines on one event loop, whose generations a Feeder submits."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from batchkit.config.tables import JobConfig
from batchkit.errors import RowTimeoutError
from batchkit.execution.rollouts.open_row import Answer, OpenRow
from batchkit.rendering.prefetch import Prefetch
from batchkit.types import Completion, Key, Request, Task

T = TypeVar("T")

Solve = Callable[[OpenRow], Awaitable[Completion]]

_AHEAD = 256  # requests that wait to be submitted
_BEGUN_AT_ONCE = 64
_STIR_S = 0.005  # how long a row may take to ask again before others are submitted without it
_LOOK_S = 1.0
_CLOSE_S = 5.0


class Rollouts:
    """Used in place of a Prefetch: ``get`` gives requests, and the outcome of each row as a
    Completion with ``generations``. ``solve`` is the coroutine of a row.

    Rows are begun as the engine has room, at most ``concurrency`` at a time, and none while
    ``media.max_memory_bytes`` of decoded pixels are held. Requests of rows that are further come first,
    and last once the input has been read: then the rows that begin last end soonest.

    Threads: the event loop's runs the coroutines; ``run.render_threads`` render; the worker's calls
    ``get``, ``answer`` and ``release``. ``_changed`` guards what the first and the last share.
    """

    def __init__(
        self, job: JobConfig, tasks: Prefetch[Task, Task], solve: Solve, *, concurrency: int
    ) -> None:
        self._job, self._tasks, self._solve = job, tasks, solve
        self._concurrency = concurrency
        self._changed = threading.Condition()
        self._ended: deque[Completion] = deque()
        self._further: deque[Request] = deque()
        self._first: deque[Request] = deque()
        self._open: dict[int, OpenRow] = {}
        self._answers: dict[Key, Answer] = {}
        self._held_bytes = 0
        self._stirred_at = 0.0
        self._error: BaseException | None = None
        self._threads = ThreadPoolExecutor(job.run.render_threads, "render")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
        self._thread.start()

    def get(self, timeout_s: float) -> Request | Completion | None:
        """The next request to submit, or a row's outcome; None if there is none within ``timeout_s``.

        Raises what reading the rows raised, once every row before has ended.
        """
        self._begin()
        with self._changed:
            self._changed.wait_for(lambda: self._is_ready, max(timeout_s, self._stir_s))
            if self._error is not None:
                raise self._error
            if self._ended:
                return self._ended.popleft()
            while self._further or self._first:
                # Near the end of the input every row should begin soon: its generations follow each other.
                line = self._first if self._tasks.all_read else self._further
                request = (line or self._first or self._further).popleft()
                if request.row.index in self._open:
                    return request
                self._held_bytes -= request.media_bytes  # its row has ended without it
        if self._tasks.broken and not self._open:
            self._tasks.get(timeout_s=0)
        return None

    def ended(self) -> list[Completion]:
        """The outcomes of rows, without requests; waits for rows that were just answered."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._ended), self._stir_s)
            ended, self._ended = [*self._ended], deque()
            return ended

    def answer(self, completions: Sequence[Completion]) -> None:
        """Hand each to the row that asked for it; it is in the ledger by now."""
        if completions:
            self._stirred_at = time.monotonic()
            self._loop.call_soon_threadsafe(self._deliver, completions)

    def release(self, request: Request) -> None:
        """It is answered: its pixels no longer count."""
        with self._changed:
            self._held_bytes -= request.media_bytes

    @property
    def exhausted(self) -> bool:
        """True once every row has ended, and its outcome was handed out."""
        with self._changed:
            return self._tasks.exhausted and not self._open and not self._is_ready

    @property
    def broken(self) -> bool:
        """True once the next ``get`` raises what reading the rows raised."""
        with self._changed:
            return self._tasks.broken and not self._open and not self._is_ready

    def close(self) -> None:
        """Drop the rows that have not ended."""
        self._tasks.close()
        self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(_CLOSE_S)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def queue(self, request: Request, answer: Answer) -> None:
        """For a row: have ``request`` answered."""
        with self._changed:
            row = self._open.get(request.row.index)
            if row is None:  # what the row has started goes on after its end
                answer.cancel()
                return
            is_first = not row.has_begun
            self._answers[request.key] = answer
            self._held_bytes += request.media_bytes
            (self._first if is_first else self._further).append(request)
            self._changed.notify_all()

    async def in_thread(self, do: Callable[[], T]) -> T:
        """For a row: the result of ``do``, which may take long."""
        return await self._loop.run_in_executor(self._threads, do)

    @property
    def _is_ready(self) -> bool:
        return bool(self._ended or self._further or self._first or self._error)

    @property
    def _stir_s(self) -> float:
        """How much longer rows that were just answered or begun may take to ask."""
        return max(0.0, self._stirred_at + _STIR_S - time.monotonic()) if self._open else 0.0

    def _begin(self) -> None:
        """Begin further rows, if few requests wait."""
        tasks: list[Task] = []
        with self._changed:
            room = min(_BEGUN_AT_ONCE, self._concurrency - len(self._open))
            if len(self._first) >= _AHEAD:
                room = 0
            if self._held_bytes >= self._job.media.max_memory_bytes:
                room = 0
        while len(tasks) < room and not self._tasks.broken:
            if (task := self._tasks.get(timeout_s=0)) is None:
                break
            tasks.append(task)
        if tasks:
            with self._changed:
                for task in tasks:
                    self._open[task.row.index] = OpenRow(task, self._job, self)
            self._stirred_at = time.monotonic()
            self._loop.call_soon_threadsafe(self._start, tasks)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._watcher = self._loop.create_task(self._watch())
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _stop(self) -> None:
        """Let every coroutine end, then the loop."""
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        ended = asyncio.gather(*tasks, return_exceptions=True)
        ended.add_done_callback(lambda _: self._loop.stop())

    def _start(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            row = self._open[task.row.index]
            row.coroutine = self._loop.create_task(self._settle(row))

    async def _settle(self, row: OpenRow) -> None:
        try:
            error = row.row.error
            if error is not None:
                self._end(row, replace(row.outcome(None, ()), error=error))
            else:
                self._end(row, await self._solve(row))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # ours: get() raises it in its caller's thread
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _end(self, row: OpenRow, outcome: Completion) -> None:
        with self._changed:
            if self._open.pop(row.row.index, None) is not None:
                self._ended.append(outcome)
                self._changed.notify_all()

    def _deliver(self, completions: Sequence[Completion]) -> None:
        for completion in completions:
            answer = self._answers.pop(completion.request.key)
            if not answer.done():
                answer.set_result(completion)

    async def _watch(self) -> None:
        """End rows that neither ask nor return for ``run.row_timeout_s``."""
        limit_s = self._job.run.row_timeout_s
        while True:
            await asyncio.sleep(_LOOK_S)
            now = time.monotonic()
            for row in [*self._open.values()]:
                if not row.waiting and now - row.since > limit_s and row.coroutine is not None:
                    error = RowTimeoutError(
                        f"it neither asked for a generation nor ended for {limit_s:g} s"
                        " (run.row_timeout_s)"
                    )
                    self._end(row, replace(row.outcome(None, ()), error=error))
                    row.coroutine.cancel()
