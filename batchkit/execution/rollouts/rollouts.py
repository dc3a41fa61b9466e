"""Rows with several generations: coroutines on one event loop, whose requests the lanes submit."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from batchkit.errors import BlockedError, RolloutError, RowTimeoutError
from batchkit.execution.rollouts.function import Rollout
from batchkit.execution.rollouts.open_row import Asked, OpenRow
from batchkit.execution.rollouts.row_loop import RenderRoom, RowLoop
from batchkit.execution.rollouts.steps import Steps
from batchkit.execution.rollouts.transcription import Transcription
from batchkit.execution.start import Start
from batchkit.rendering.held_media import HeldMedia
from batchkit.rendering.prefetch import AHEAD, read_ahead
from batchkit.types import Completion, Request, Task

_STEPS_BEGUN = 4096  # most rows of ``[[steps]]`` in progress
_BEGUN_AT_ONCE = 64  # rows are begun in batches of this size, which is cheaper
_STIR_S = 0.005  # wait this long for an answered row's next request before requests of other rows
_DRAIN_S = 0.1  # when the run stops, wait this long for an answered row to end


def _solver_of(start: Start) -> Steps | Rollout | Transcription:
    if start.job.task == "transcribe":
        return Transcription(start)
    return Steps(start) if start.job.steps else Rollout(start)


class Waiting(NamedTuple):
    """Requests that wait for one engine.

    - ``further``: requests of rows that have already received an answer.
    - ``first``: requests of rows that have received no answer yet.
    """

    further: deque[Asked]
    first: deque[Asked]

    def __bool__(self) -> bool:
        return bool(self.further or self.first)


@dataclass(frozen=True, slots=True)
class PausedRow:
    """A row that can't continue until the named engine is loaded."""

    index: int
    engine: str


class Rollouts:
    """A source of requests from rows with several generations.

    ``get`` returns requests for an engine, and the outcome of each row as a Completion with ``generations``.

    - **Begin.** Rows begin when the engines have room, at most ``rollout.concurrency`` at the same time. Without
      ``[rollout]``, the limit is 4,096 rows, of which at most 256 wait for no generation. No row begins while the
      decoded media in memory exceed ``media.max_memory_bytes``.
    - **Order.** While there are rows to read, requests of rows that already have an answer are returned first, so that
      rows end soon. Once the input has been read, these requests are returned last, because the run ends sooner if the
      last rows begin early.
    - **Pause.** A row is paused if it waits only for engines that are not in ``engines``. The row is dropped, and
      begins again with its recorded generations once an engine that it needs is loaded.

    Threads: the event loop's thread runs the coroutines; ``run.render_threads`` threads render; the worker's thread
    calls ``get``, ``take_ended``, ``answer`` and ``release``. ``_changed`` guards the state that the event loop and the
    worker share.

    ``may_wait``: True if reading ``tasks`` may block.
    """

    def __init__(
        self, start: Start, tasks: Iterator[Task], engines: Sequence[str], *, may_wait: bool
    ) -> None:
        self._start, self._job = start, start.job
        self._solve = _solver_of(start).solve
        self._tasks = read_ahead(
            tasks, max_bytes=start.job.media.max_memory_bytes, may_wait=may_wait
        )
        self._changed = threading.Condition()
        self._ended = deque[Completion]()
        self._paused: list[PausedRow] = []
        self._waiting = {name: Waiting(deque(), deque()) for name in engines}
        self._open: dict[int, OpenRow] = {}
        self._n_busy = 0  # open rows that wait for no generation
        self._stirred_at = 0.0
        self._error: BaseException | None = None
        held = HeldMedia(start.job.media.max_memory_bytes, start.options.media_holders)
        self.renders = RenderRoom(start.job.run.render_threads, held)
        self._loop = RowLoop(self._fail, self._end_late_rows)

    def get(self, engine: str, timeout_s: float) -> Request | Completion | None:
        """Return the next request for ``engine``, or the outcome of a row; None after ``timeout_s``.

        Raises the error that occurred while rows were read or that stopped the event loop, once all begun rows have
        ended.
        """
        waiting = self._waiting[engine]
        if len(self._waiting) > 1:  # other engines may have answers
            timeout_s = min(timeout_s, _STIR_S)
        self._begin()

        def is_ready() -> bool:
            return bool(waiting or self._ended or self._error)

        with self._changed:
            if timeout_s > 0:
                self._changed.wait_for(is_ready, timeout_s)
            else:
                stir_s = self._stirred_at + _STIR_S - time.monotonic()
                self._changed.wait_for(lambda: is_ready() or not self._n_busy, stir_s)
            if self._ended:
                return self._ended.popleft()
            if self._error is not None:
                raise self._error
            while waiting:
                # A row's generations run one after another, so all rows must begin early near the end of the input.
                line = waiting.first if self._tasks.all_read else waiting.further
                request, answer = (line or waiting.first or waiting.further).popleft()
                if not answer.done():
                    return request
                self.release(request)  # its row has ended or cancelled it
            is_over = not self._open
        if is_over and self._tasks.will_raise:
            self._tasks.get(timeout_s=0)  # raises the input's error
        self._end_blocked_row()
        return None

    def take_ended(self) -> list[Completion]:
        """Return the outcomes of rows that have ended. Used while the run is stopping and submits no more requests.

        Waits up to ``_DRAIN_S`` for rows that were just answered.
        """
        with self._changed:
            drain_s = self._stirred_at + _DRAIN_S - time.monotonic()
            self._changed.wait_for(lambda: not self._n_busy, drain_s)
            ended, self._ended = [*self._ended], deque()
            return ended

    def take_paused(self) -> list[PausedRow]:
        """Return the rows that were paused since the last call."""
        with self._changed:
            paused, self._paused = self._paused, []
            return paused

    def answer(self, completions: Iterable[Completion]) -> None:
        """Give each completion to the row that requested it. The ledger must have written the generation before."""
        answered: list[tuple[OpenRow, Asked, Completion]] = []
        with self._changed:
            for completion in completions:
                row = self._open.get(completion.request.row.index)
                if row is not None and (asked := row.pending.pop(completion.request.key, None)):
                    self._n_busy += not row.pending
                    answered.append((row, asked, completion))
        if answered:
            self._stirred_at = time.monotonic()
            self._loop.soon(self._deliver, answered)

    def release(self, request: Request) -> None:
        """Free the decoded media of an answered request."""
        if request.media_bytes:
            self._loop.soon(self.renders.free, request)

    @property
    def exhausted(self) -> bool:
        """True once every row has ended or was paused, and all outcomes were returned."""
        with self._changed:
            is_handed_out = not (self._open or self._is_ready or self._paused)
            return self._tasks.exhausted and is_handed_out

    @property
    def will_raise(self) -> bool:
        """True if reading the rows has failed and all begun rows have ended, so that the next ``get`` raises the
        error."""
        with self._changed:
            if self._error is not None:
                return not self._ended
            return self._tasks.will_raise and not self._open and not self._is_ready

    def close(self) -> None:
        """Drop the rows that have not ended."""
        self._tasks.close()
        self._loop.close()
        self.renders.close()

    async def generated(self, row: OpenRow, request: Request) -> Completion:
        """Queue a row's request for its engine, and return the completion. The wait is cancelled if the row ends
        first."""
        asked = Asked(request, asyncio.get_running_loop().create_future())
        self._queue(row, asked)
        try:
            return await asked.answer
        finally:
            self._forget(row, asked)

    @property
    def _is_ready(self) -> bool:
        return bool(self._ended or self._error or any(self._waiting.values()))

    def _queue(self, row: OpenRow, asked: Asked) -> None:
        with self._changed:
            # The row has ended (for example after a timeout), but its code still runs.
            if self._open.get(row.row.index) is not row:
                asked.answer.cancel()
                self.release(asked.request)
                return
            self._n_busy -= not row.pending
            row.pending[asked.request.key] = asked
            if (waiting := self._waiting.get(asked.engine)) is not None:
                is_first = not waiting
                (waiting.further if row.has_begun else waiting.first).append(asked)
                if is_first or not self._n_busy:
                    self._changed.notify_all()
                return
        self.release(asked.request)
        self._pause_soon(row)

    def _forget(self, row: OpenRow, asked: Asked) -> None:
        """Remove a request whose answer the row no longer waits for."""
        with self._changed:
            if row.pending.get(asked.request.key) is not asked:  # it was answered
                return
            del row.pending[asked.request.key]
            if not row.pending:
                self._n_busy += self._open.get(row.row.index) is row
        self._pause_soon(row)

    def _begin(self) -> None:
        """Begin more rows if few requests wait for the engines."""
        with self._changed:
            table = self._job.rollout
            room = min(
                _BEGUN_AT_ONCE,
                (table.concurrency if table else _STEPS_BEGUN) - len(self._open),
                (table.concurrency if table else AHEAD) - self._n_busy,
                AHEAD - sum(len(waiting.first) for waiting in self._waiting.values()),
            )
            if self._error is not None or self.renders.is_full:
                return
            if self._is_ready and room < _BEGUN_AT_ONCE:  # beginning rows in batches is cheaper
                return
        rows = [OpenRow(task, self._start, self) for task in self._read(room)]
        if rows:
            with self._changed:
                self._open |= {row.row.index: row for row in rows}
                self._n_busy += len(rows)
            self._stirred_at = time.monotonic()
            self._loop.soon(self._run, rows)

    def _read(self, most: int) -> list[Task]:
        tasks: list[Task] = []
        while len(tasks) < most and not self._tasks.will_raise:
            try:
                task = self._tasks.get(timeout_s=0)
            except BaseException:  # ``get`` raises it again once all rows have ended
                break
            if task is None:
                break
            tasks.append(task)
        return tasks

    def _run(self, rows: Sequence[OpenRow]) -> None:
        for row in rows:
            self._loop.start(row, self._run_one(row))

    async def _run_one(self, row: OpenRow) -> None:
        try:
            error = row.row.error
            outcome = await self._solve(row) if error is None else row.failed(error)
            self._end(row, outcome if row.fault is None else row.failed(row.fault))
        except asyncio.CancelledError:
            error_text = "the rollout's function cancelled its own asyncio task"
            self._end(row, row.failed(RolloutError(error_text)))
            raise
        except BaseException as error:  # a bug of batchkit: get() raises it in its caller's thread
            self._fail(error)

    def _end(self, row: OpenRow, outcome: Completion) -> None:
        """Record the row's outcome, unless it already has one, and cancel its open requests."""
        with self._changed:
            if self._open.get(row.row.index) is not row:
                return
            del self._open[row.row.index]
            self._n_busy -= not row.pending
            self._ended.append(outcome)
            self._changed.notify_all()
        for asked in [*row.pending.values()]:
            asked.answer.cancel()

    def _deliver(self, answered: Sequence[tuple[OpenRow, Asked, Completion]]) -> None:
        for row, asked, completion in answered:
            row.since = time.monotonic()
            if not asked.answer.done():
                asked.answer.set_result(completion)
            self._pause_soon(row)

    def _pause_soon(self, row: OpenRow) -> None:
        """Pause the row after a moment if it waits only for engines that are not loaded.

        The delay lets code that has just received an answer make a request to a loaded engine first.
        """
        if self._is_stuck(row):
            asyncio.get_running_loop().call_later(_STIR_S, self._pause, row)

    def _pause(self, row: OpenRow) -> None:
        if row.is_rendering:
            self._pause_soon(row)
            return
        with self._changed:
            if self._open.get(row.row.index) is not row or not self._is_stuck(row):
                return
            del self._open[row.row.index]
            first = next(iter(row.pending.values()))
            self._paused.append(PausedRow(row.row.index, first.engine))
            self._changed.notify_all()
        if row.coroutine is not None:
            row.coroutine.cancel()

    def _is_stuck(self, row: OpenRow) -> bool:
        """Return whether the row waits only for engines that are not loaded."""
        pending = [*row.pending.values()]
        return bool(pending) and not any(asked.engine in self._waiting for asked in pending)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _end_late_rows(self) -> None:
        """Fail rows that have done nothing for ``run.row_timeout_s``: no generation runs, and their code has not
        returned."""
        now, limit_s = time.monotonic(), self._job.run.row_timeout_s
        with self._changed:
            late = [row for row in self._open.values() if row.idle_s(now) > limit_s]
        for row in late:
            error = (
                f"the function neither generated nor returned for {limit_s:g} s (run.row_timeout_s)"
            )
            self._end(row, row.failed(RowTimeoutError(error)))
            if row.coroutine is not None:
                row.coroutine.cancel()

    def _end_blocked_row(self) -> None:
        """Stop the run if a row's code blocks the event loop for ``run.row_timeout_s``."""
        limit_s = self._job.run.row_timeout_s
        if self._error is not None or not self._loop.check_blocked(limit_s):
            return
        row, where = self._loop.running
        fault = (
            f"let no other row run for {limit_s:g} s (run.row_timeout_s); run blocking code in a thread:"
            " await asyncio.to_thread(function, …)"
        )
        name = "a callback" if row is None else f"row {row.row.index} (id {row.row.id})"
        if row is not None:
            with self._changed:
                if self._open.pop(row.row.index, None) is row:
                    error = RowTimeoutError(f"the row's code {fault}. The code was at\n{where}")
                    self._ended.append(row.failed(error))
        self._fail(
            BlockedError(
                f"the rollout's code of {name} {fault}. That row has failed; run the same command to"
                f" continue with the other rows. The code was at\n{where}"
            )
        )
