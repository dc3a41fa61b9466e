"""What lanes submit: the requests of all rows, rendered ahead, or asked for by the rows' coroutines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from batchkit.execution.rollouts.rollouts import PausedRow, Rollouts
from batchkit.execution.start import Start
from batchkit.rendering.prefetch import AHEAD, READ_AT_ONCE, Prefetch
from batchkit.types import Completion, Request, Task

Rendered = dict[int, Request | Completion]


class Requests(Protocol):
    """The requests of all rows, by engine. Used by the worker's thread."""

    def get(self, engine: str, timeout_s: float) -> Request | Completion | None:
        """The next request for ``engine``, or the completion of a row that ended without it; None if there
        is none within ``timeout_s``. Raises what reading the rows raised, after all rows before."""

    def release(self, request: Request, /) -> None:
        """It is settled: its pixels no longer count."""

    def answer(self, completions: Sequence[Completion]) -> None:
        """Hand each to the row that asked for it; it is in the ledger by now."""

    def ended(self) -> list[Completion]:
        """The outcomes of rows that ended since, if no further request is wanted."""

    def paused(self) -> list[PausedRow]:
        """Rows that wait for an engine that is not loaded, since the last call."""

    @property
    def exhausted(self) -> bool:
        """True once every row was handed out, and none may ask for more."""

    @property
    def broken(self) -> bool:
        """True once the next ``get`` raises."""

    def close(self) -> None:
        """Drop the rows that have not ended."""


class RowRequests:
    """The requests of rows that have one generation each, rendered in threads."""

    def __init__(self, ahead: Prefetch[Task, Request | Completion]) -> None:
        self._ahead = ahead
        self.release, self.close = ahead.release, ahead.close

    def get(self, engine: str, timeout_s: float) -> Request | Completion | None:
        return self._ahead.get(timeout_s)

    def answer(self, completions: Sequence[Completion]) -> None:
        """Rows ask nothing further."""

    def ended(self) -> list[Completion]:
        return []

    def paused(self) -> list[PausedRow]:
        return []

    @property
    def exhausted(self) -> bool:
        return self._ahead.exhausted

    @property
    def broken(self) -> bool:
        return self._ahead.broken


def requests_of(
    start: Start,
    tasks: Iterator[Task],
    engines: Sequence[str],
    *,
    may_wait: bool,
    rendered: Rendered | None = None,
) -> Requests:
    """Begin to render ``tasks``, for ``engines``. ``may_wait``: reading them may block. ``rendered``:
    rows that have been, by index; each is taken out of it."""
    job, renderer = start.job, start.renderer
    if job.has_several:
        return Rollouts(start, tasks, engines, may_wait=may_wait)
    ready = {} if rendered is None else rendered

    def render(task: Task) -> Request | Completion:
        found = ready.pop(task.row.index, None)
        return renderer.render_or_fail(task.row, task.attempt) if found is None else found

    is_light = not (renderer.takes_long or renderer.opens_files)
    ahead = Prefetch(
        tasks,
        render,
        threads=1 if is_light else job.run.render_threads,  # more would wait for Python's lock
        ahead=AHEAD,
        max_bytes=job.media.max_memory_bytes,
        at_once=1 if may_wait or renderer.takes_long else READ_AT_ONCE,
    )
    return RowRequests(ahead)
