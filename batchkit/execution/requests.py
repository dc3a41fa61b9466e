"""Sources of the requests that lanes submit: rows that are rendered ahead, or the coroutines of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from batchkit.execution.rollouts.rollouts import PausedRow, Rollouts
from batchkit.execution.start import Start
from batchkit.rendering.held_media import HeldMedia
from batchkit.rendering.prefetch import AHEAD, READ_AT_ONCE, Prefetch
from batchkit.rendering.steps import render_or_fail
from batchkit.types import Completion, Request, Task


class RowRequests:
    """A source of requests from rows with one generation each, which are rendered in threads. It has the interface of
    Rollouts."""

    def __init__(self, start: Start, tasks: Iterator[Task], *, may_wait: bool) -> None:
        job, renderer = start.job, start.renderer

        def made(task: Task) -> Request | Completion:
            rendered = render_or_fail(renderer, task.row, task.attempt)
            return start.hashes.hashed(rendered) if isinstance(rendered, Request) else rendered

        # For light rows, more threads would only wait for the GIL.
        is_light = not (renderer.takes_long or renderer.opens_files)
        self._ahead: Prefetch[Task, Request | Completion] = Prefetch(
            tasks,
            made,
            threads=1 if is_light else job.run.render_threads,
            ahead=AHEAD,
            held=HeldMedia(job.media.max_memory_bytes, start.options.media_holders),
            at_once=1 if may_wait or renderer.takes_long else READ_AT_ONCE,
        )
        self.release, self.close = self._ahead.release, self._ahead.close

    def get(self, engine: str, timeout_s: float) -> Request | Completion | None:
        return self._ahead.get(timeout_s)

    def answer(self, completions: Sequence[Completion]) -> None:
        """Do nothing, because each of these rows makes only one request. For the same reason, ``take_ended`` and
        ``take_paused`` return nothing."""

    def take_ended(self) -> list[Completion]:
        return []

    def take_paused(self) -> list[PausedRow]:
        return []

    @property
    def exhausted(self) -> bool:
        return self._ahead.exhausted

    @property
    def will_raise(self) -> bool:
        return self._ahead.will_raise


Requests = RowRequests | Rollouts
"""The type is Rollouts if the job has ``[[steps]]`` or a ``[rollout]``, or transcribes; otherwise RowRequests."""


def requests_of(
    start: Start, tasks: Iterator[Task], engines: Sequence[str], *, may_wait: bool
) -> Requests:
    """Return the source of requests for ``tasks``, and start to render them.

    ``may_wait``: True if reading the tasks may block.
    """
    if start.job.has_several:
        return Rollouts(start, tasks, engines, may_wait=may_wait)
    return RowRequests(start, tasks, may_wait=may_wait)
