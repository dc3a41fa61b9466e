"""The rows that are begun: coroutines on one event loop, whose generations a Feeder submits."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from batchkit.config.tables import JobConfig
from batchkit.errors import BlockedError, RolloutError, RowTimeoutError
from batchkit.execution.rollouts.daemon_threads import DaemonThreads
from batchkit.execution.rollouts.open_row import Answer, OpenRow
from batchkit.execution.rollouts.shown import shown_code
from batchkit.rendering.prefetch import AHEAD, Prefetch
from batchkit.types import Completion, Request, Task

T = TypeVar("T")

Solve = Callable[[OpenRow], Awaitable[Completion]]

_BEGUN_AT_ONCE = 64
_STIR_S = 0.005  # how long a row may take to ask again before others are submitted without it
_DRAIN_S = 0.1  # how long one may take to end, if the run stops
_LOOK_S = 1.0
_CLOSE_S = 5.0
_SIDE_THREADS = 32  # of asyncio.to_thread

_ROW: ContextVar[OpenRow | None] = ContextVar("row", default=None)


class Waiting(NamedTuple):
    """Requests for one engine; those of rows that had an answer are ``further``."""

    further: deque[Request]
    first: deque[Request]

    def __bool__(self) -> bool:
        return bool(self.further or self.first)


@dataclass(frozen=True, slots=True)
class PausedRow:
    """A row that can't go on before the engine of that name is loaded."""

    index: int
    engine: str


class ForEngine(NamedTuple):
    """What ``Rollouts`` have for the engine ``name``, used in place of a Prefetch."""

    rollouts: Rollouts
    name: str

    def get(self, timeout_s: float) -> Request | Completion | None:
        return self.rollouts.get(self.name, timeout_s)

    def release(self, request: Request) -> None:
        self.rollouts.release(request)

    @property
    def exhausted(self) -> bool:
        return self.rollouts.exhausted

    @property
    def broken(self) -> bool:
        return self.rollouts.broken


class Rollouts:
    """``get`` gives the requests for an engine, and the outcome of each row as a Completion with
    ``generations``. ``solve`` is the coroutine of a row.

    Rows are begun as the engines have room: at most ``concurrency`` at a time, of which at most
    ``most_busy`` wait for no generation; and none while ``media.max_memory_bytes`` of decoded pixels
    are held. Requests of rows that are further come first, and last once the input has been read: then
    the rows that begin last end soonest. A row that waits for another engine than ``engines``, and for
    nothing else, is paused: it is dropped, and begins again, with its recorded generations, once that
    engine is loaded.

    Threads: the event loop's runs the coroutines; ``run.render_threads`` render; the worker's calls
    ``get``, ``ended``, ``answer`` and ``release``. ``_changed`` guards what the first and the last
    share.
    """

    def __init__(
        self,
        job: JobConfig,
        tasks: Prefetch[Task, Task],
        solve: Solve,
        *,
        engines: Sequence[str],
        concurrency: int,
        most_busy: int,
    ) -> None:
        self._job, self._tasks, self._solve = job, tasks, solve
        self._concurrency, self._most_busy = concurrency, most_busy
        self._changed = threading.Condition()
        self._ended: deque[Completion] = deque()
        self._waiting = {name: Waiting(deque(), deque()) for name in engines}
        self._paused: list[PausedRow] = []
        self._open: dict[int, OpenRow] = {}
        self._n_busy = 0  # open rows that wait for no generation
        self._n_coming = 0  # answers that the loop has yet to hand out
        self._held_bytes = 0
        self._stirred_at = 0.0
        self._error: BaseException | None = None
        self._beat = self._looked_at = time.monotonic()
        self._late_looks = 0
        self._closing = False
        threads = job.run.render_threads
        self._threads = DaemonThreads(threads, "render")
        self._loads, self._freed = asyncio.Semaphore(threads), asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._loop.set_task_factory(_row_task)
        self._loop.set_default_executor(DaemonThreads(_SIDE_THREADS, "rollout"))
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
        self._thread.start()

    def of(self, engine: str) -> ForEngine:
        return ForEngine(self, engine)

    def get(self, engine: str, timeout_s: float) -> Request | Completion | None:
        """The next request to submit, or a row's outcome; None if there is none within ``timeout_s``.

        Raises what reading the rows raised, once every row before has ended, or what has stopped
        the event loop.
        """
        waiting = self._waiting[engine]
        if len(self._waiting) > 1:  # the others may have answers
            timeout_s = min(timeout_s, _STIR_S)
        self._begin()

        def is_ready() -> bool:
            return bool(waiting or self._ended or self._error)

        with self._changed:
            if timeout_s > 0:
                self._changed.wait_for(is_ready, timeout_s)
            else:
                stir_s = self._stirred_at + _STIR_S - time.monotonic()
                self._changed.wait_for(lambda: is_ready() or not self._may_come, stir_s)
            if self._ended:
                return self._ended.popleft()
            if self._error is not None:
                raise self._error
            while waiting:
                # Near the end of the input every row should begin soon: its generations follow each other.
                line = waiting.first if self._tasks.all_read else waiting.further
                request = (line or waiting.first or waiting.further).popleft()
                if self._is_waited_for(request):
                    return request
                self._free(request)
            is_over = not self._open
        if is_over and self._tasks.broken:
            self._tasks.get(timeout_s=0)
        self._look_at_loop()
        return None

    def ended(self) -> list[Completion]:
        """The outcomes of rows, without requests; waits a moment for rows that were just answered."""
        with self._changed:
            drain_s = self._stirred_at + _DRAIN_S - time.monotonic()
            self._changed.wait_for(lambda: not self._may_come, drain_s)
            ended, self._ended = [*self._ended], deque()
            return ended

    def paused(self) -> list[PausedRow]:
        """Rows that were paused since the last call."""
        with self._changed:
            paused, self._paused = self._paused, []
            return paused

    def answer(self, completions: Sequence[Completion]) -> None:
        """Hand each to the row that asked for it; it is in the ledger by now."""
        if completions:
            with self._changed:
                self._n_coming += len(completions)
            self._stirred_at = time.monotonic()
            self._soon(self._deliver, completions)

    def release(self, request: Request) -> None:
        """It is answered: its pixels no longer count."""
        if request.media_bytes:
            with self._changed:
                self._free(request)

    @property
    def exhausted(self) -> bool:
        """True once every row has ended or was paused, and this was handed out."""
        with self._changed:
            is_handed_out = not (self._open or self._is_ready or self._paused)
            return self._tasks.exhausted and is_handed_out

    @property
    def broken(self) -> bool:
        """True once the next ``get`` raises an error."""
        with self._changed:
            if self._error is not None:
                return not self._ended
            return self._tasks.broken and not self._open and not self._is_ready

    def close(self) -> None:
        """Drop the rows that have not ended. Their code may go on for a while if it swallows its
        cancellation, or blocks; nothing waits for it."""
        self._tasks.close()
        with suppress(RuntimeError):  # closed already
            self._soon(self._stop)
        self._thread.join(_CLOSE_S)
        self._threads.shutdown()

    def queue(self, row: OpenRow, request: Request) -> Answer:
        """For a row: the answer to ``request``, which is cancelled if the row has ended."""
        answer = self._loop.create_future()
        with self._changed:
            if self._open.get(row.row.index) is not row:  # its code goes on after its end
                answer.cancel()
                return answer
            self._n_busy -= not row.pending
            row.pending[request.key] = answer
            assert request.call is not None
            waiting = self._waiting.get(request.call.engine)
            if waiting is None:
                row.stuck[request.key] = request.call.engine
                self._pause_soon(row)
                return answer
            self._held_bytes += request.media_bytes
            is_first = not waiting
            (waiting.further if row.has_begun else waiting.first).append(request)
            if is_first or not self._may_come:
                self._changed.notify_all()
        return answer

    def unqueue(self, row: OpenRow, request: Request, answer: Answer) -> None:
        """For a row: it no longer waits for the ``answer`` to ``request``."""
        if row.pending.get(request.key) is not answer:  # it has come, or was recorded
            return
        with self._changed:
            del row.pending[request.key]
            if not row.pending:
                self._n_busy += self._open.get(row.row.index) is row
        self._pause_soon(row)

    def runs_alone(self, row: OpenRow) -> bool:
        """For a row: whether no task runs beside the current one and those that have started it."""
        others = row.tasks - _lineage(asyncio.current_task())
        return all(task.done() for task in others)

    @asynccontextmanager
    async def loading(self) -> AsyncIterator[None]:
        """For a row: within it pixels are decoded, at its end they are counted. It begins once there
        is room for them."""
        async with self._loads:
            while self._held_bytes >= self._job.media.max_memory_bytes:
                self._freed.clear()
                await self._freed.wait()
            yield

    async def in_thread(self, do: Callable[[], T]) -> T:
        """For a row: the result of ``do``, which may take long."""
        return await self._loop.run_in_executor(self._threads, do)

    @property
    def _is_ready(self) -> bool:
        return bool(self._ended or self._error or any(self._waiting.values()))

    @property
    def _may_come(self) -> bool:
        """Whether a row may ask or end before the engine answers."""
        return self._n_busy > 0 or self._n_coming > 0

    def _is_waited_for(self, request: Request) -> bool:
        row = self._open.get(request.row.index)
        answer = None if row is None else row.pending.get(request.key)
        return answer is not None and not answer.done()

    def _free(self, request: Request) -> None:
        self._held_bytes -= request.media_bytes
        self._soon(self._freed.set)

    def _begin(self) -> None:
        """Begin further rows, if few requests wait."""
        tasks: list[Task] = []
        with self._changed:
            room = min(
                _BEGUN_AT_ONCE,
                self._concurrency - len(self._open),
                self._most_busy - self._n_busy - self._n_coming,
                AHEAD - sum(len(waiting.first) for waiting in self._waiting.values()),
            )
            if self._error is not None or self._held_bytes >= self._job.media.max_memory_bytes:
                room = 0
            if self._is_ready and room < _BEGUN_AT_ONCE:  # many at once cost less
                room = 0
        while len(tasks) < room and not self._tasks.broken:
            try:
                task = self._tasks.get(timeout_s=0)
            except BaseException:  # it is raised again once all rows have ended
                break
            if task is None:
                break
            tasks.append(task)
        if tasks:
            rows = [OpenRow(task, self._job, self) for task in tasks]
            with self._changed:
                self._open |= {row.row.index: row for row in rows}
                self._n_busy += len(rows)
            self._stirred_at = time.monotonic()
            self._soon(self._start, rows)

    def _soon(self, do: Callable[..., None], *args: Any) -> None:
        """``do`` on the loop's thread; its error stops the run."""

        def guarded() -> None:
            try:
                do(*args)
            except BaseException as error:
                self._fail(error)

        self._loop.call_soon_threadsafe(guarded)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._watcher = self._loop.create_task(self._watch())
        while not self._closing:  # the user's code may have stopped the loop
            with suppress(SystemExit, KeyboardInterrupt):  # the task that raised it has it, too
                self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _stop(self) -> None:
        """Let every coroutine end, then the loop."""
        self._closing = True
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        ended = asyncio.gather(*tasks, return_exceptions=True)
        ended.add_done_callback(lambda _: self._loop.stop())

    def _start(self, rows: Sequence[OpenRow]) -> None:
        for row in rows:
            row.coroutine = task = self._loop.create_task(self._settle(row))
            task.row = row  # type: ignore[attr-defined]

    async def _settle(self, row: OpenRow) -> None:
        _ROW.set(row)
        try:
            error = row.row.error
            self._end(row, await self._solve(row) if error is None else row.failed(error))
        except asyncio.CancelledError:
            self._end(row, row.failed(RolloutError("the function's own code has cancelled it")))
            raise
        except BaseException as error:  # ours: get() raises it in its caller's thread
            self._fail(error)

    def _end(self, row: OpenRow, outcome: Completion) -> None:
        """The row's outcome, unless it has one; what it still waits for is cancelled."""
        with self._changed:
            if self._open.get(row.row.index) is not row:
                return
            del self._open[row.row.index]
            self._n_busy -= not row.pending
            self._ended.append(outcome)
            self._changed.notify_all()
        for answer in [*row.pending.values()]:
            answer.cancel()

    def _pause_soon(self, row: OpenRow) -> None:
        """If it waits for an engine that is not loaded; what it got may make it ask another first."""
        if row.stuck:
            self._loop.call_later(_STIR_S, self._pause, row)

    def _pause(self, row: OpenRow) -> None:
        with self._changed:
            stuck = row.stuck.keys() & row.pending.keys()
            if self._open.get(row.row.index) is not row or not stuck or row.pending.keys() - stuck:
                return
            if row.is_stirring:
                self._pause_soon(row)
                return
            del self._open[row.row.index]
            self._paused.append(PausedRow(row.row.index, row.stuck[next(iter(stuck))]))
            self._changed.notify_all()
        if row.coroutine is not None:
            row.coroutine.cancel()

    def _deliver(self, completions: Sequence[Completion]) -> None:
        self._beat = now = time.monotonic()
        with self._changed:
            for completion in completions:
                row = self._open.get(completion.request.row.index)
                if row is None or (answer := row.pending.pop(completion.request.key, None)) is None:
                    continue  # its row has ended, or waits for it no longer
                self._n_busy += not row.pending
                row.since = now
                self._pause_soon(row)
                if not answer.done():
                    answer.set_result(completion)
            self._n_coming -= len(completions)
            self._changed.notify_all()

    async def _watch(self) -> None:
        """End rows that neither ask nor return for ``run.row_timeout_s``."""
        limit_s = self._job.run.row_timeout_s
        while True:
            await asyncio.sleep(_LOOK_S)
            self._beat = now = time.monotonic()
            with self._changed:
                late = [row for row in self._open.values() if row.idle_s(now) > limit_s]
            for row in late:
                error = RowTimeoutError(
                    f"it neither asked for a generation nor ended for {limit_s:g} s"
                    " (run.row_timeout_s)"
                )
                self._end(row, row.failed(error))
                if row.coroutine is not None:
                    row.coroutine.cancel()

    def _look_at_loop(self) -> None:
        """End the run if code of a row blocks the event loop for ``run.row_timeout_s``.

        Two looks, a second apart: after a pause of the whole process the loop must have had time.
        """
        now, limit_s = time.monotonic(), self._job.run.row_timeout_s
        if now < self._looked_at + _LOOK_S or self._error is not None:
            return
        self._looked_at = now
        self._late_looks = self._late_looks + 1 if now - self._beat > limit_s + _LOOK_S else 0
        if self._late_looks < 2:
            return
        where = shown_code(self._thread)
        advice = "put what blocks into a thread: await asyncio.to_thread(function, …)"
        task = asyncio.current_task(self._loop)
        row = task.row if isinstance(task, RowTask) else None
        name = "a callback"
        if row is not None:
            name = f"row {row.row.index} (id {row.row.id})"
            reason = (
                f"its code let no other row run for {limit_s:g} s (run.row_timeout_s); {advice}"
            )
            with self._changed:
                if self._open.pop(row.row.index, None) is row:
                    self._ended.append(row.failed(RowTimeoutError(f"{reason}. It was at\n{where}")))
        self._fail(
            BlockedError(
                f"the rollout's code of {name} let no other row run for {limit_s:g} s"
                f" (run.row_timeout_s); {advice}. That row has failed; the same command continues"
                f" with the others. It was at\n{where}"
            )
        )


class RowTask(asyncio.Task[Any]):
    """A task, the row whose code has started it, and the task in which that ran."""

    row: OpenRow | None = None
    parent: asyncio.Task[Any] | None = None


def _row_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> RowTask:
    task = RowTask(coroutine, loop=loop, **options)
    task.row, task.parent = _ROW.get(), asyncio.current_task(loop)
    if task.row is not None:
        task.row.tasks.add(task)
    return task


def _lineage(task: asyncio.Task[Any] | None) -> set[asyncio.Task[Any]]:
    """``task`` and those that have started it."""
    found: set[asyncio.Task[Any]] = set()
    while task is not None:
        found.add(task)
        task = task.parent if isinstance(task, RowTask) else None
    return found
