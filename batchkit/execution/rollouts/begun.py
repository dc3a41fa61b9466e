"""Begins the rows of a job that has several generations for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from batchkit.config.tables import JobConfig
from batchkit.execution.rollouts.function import Function, Rollout, loaded_function
from batchkit.execution.rollouts.rollouts import Rollouts
from batchkit.execution.rollouts.steps import Steps
from batchkit.rendering.prefetch import AHEAD, read_ahead
from batchkit.rendering.steps import Renderer, StepsRenderer
from batchkit.types import Task

_STEPS_BEGUN = 4096


def begun(
    job: JobConfig,
    renderer: Renderer,
    tasks: Iterator[Task],
    *,
    engines: Sequence[str],
    may_wait: bool,
    references: Mapping[str, str | None] | None,
    function: Function | None = None,
) -> Rollouts:
    """The rows of ``tasks``, as coroutines, and what they ask of ``engines``. ``may_wait``: reading them
    may block. ``references`` as for ``Worker``. ``function``: the rollout's, if it is not the one that the job names.

    Raises:
        JobError: the job names no such function.
    """
    if isinstance(renderer, StepsRenderer):
        solve = Steps(job, renderer, references).solve
        concurrency, most_busy = _STEPS_BEGUN, AHEAD
    else:
        assert job.rollout is not None
        solve = Rollout(job, renderer, function or loaded_function(job.rollout.function)).solve
        concurrency = most_busy = job.rollout.concurrency
    ahead = read_ahead(tasks, max_bytes=job.media.max_memory_bytes, may_wait=may_wait)
    return Rollouts(
        job, ahead, solve, engines=engines, concurrency=concurrency, most_busy=most_busy
    )
