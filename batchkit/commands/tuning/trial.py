"""One trial: a fresh engine that gets the job's own rows as in a run, and is measured."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from batchkit.commands.scratch import scratch_folder
from batchkit.commands.tuning.batch_size_option import batch_size_option, with_size
from batchkit.commands.tuning.feed import Feed
from batchkit.commands.tuning.rounds import Budget
from batchkit.commands.tuning.table import OK, OOM, Memory, SizeResult
from batchkit.config.tables import JobConfig
from batchkit.engines.faults import EngineDied, StartFailed
from batchkit.engines.memory import family_bytes, gpu_bytes
from batchkit.engines.process.engine import ProcessEngine
from batchkit.engines.process.launcher import LOG, Launcher
from batchkit.engines.registry import open_engine
from batchkit.errors import BatchkitError, EngineError, InputError, Interrupted, JobError
from batchkit.execution.signals import StopRequest
from batchkit.rendering.renderer import PromptRenderer
from batchkit.sources import count_rows

INTERVAL_S = 0.5
_LEAST_GPU_BYTES = 64 * 2**20  # less than a CUDA context: the engine runs on the host

Say = Callable[[str], None]


@contextmanager
def trials_of(job: JobConfig, *, rows: int | None, say: Say) -> Iterator[Trials]:
    """Trials whose engines print to a folder that is removed at the end.

    A signal ends the ``with`` block early; ``signum`` of the trials is that signal's.

    Raises:
        JobError: the job itself is invalid.
        InputError: its input has no rows.
    """
    with (
        StopRequest().installed(),
        scratch_folder("batchkit-trial-") as folder,
        closing(Launcher(folder / LOG)) as launcher,
    ):
        trials = Trials(job, launcher, rows=rows, say=say)
        try:
            yield trials
        except Interrupted as interrupted:
            trials.signum = interrupted.signum


def with_one_prompt(job: JobConfig, say: Say) -> JobConfig:
    """``job``, or its first step if it has several.

    Raises:
        JobError: what its rows ask for is not known before they are answered.
    """
    if job.rollout is not None:
        raise JobError(
            "[rollout]: what its function asks for is known only while it runs, so no batch size can be"
            " measured; try a job with a [prompt] like those of the function"
        )
    if not job.steps:
        return job
    first = job.steps[0]
    if first.engine:
        raise JobError(
            f"steps.{first.name}.engine: the first step runs on [engines.{first.engine}], and a batch size"
            " is measured for [engine]; try a job with the [engine] and the [prompt] of one step"
        )
    say(f"measured is step {first.name!r}, the first of {len(job.steps)}; so is the estimate")
    return job.of_step(first)


class Trials:
    """Trials of one job, one after the other; ``done`` holds all of them.

    ``total``: rows of the job, of which the trials use the first ``rows``.
    """

    def __init__(self, job: JobConfig, launcher: Launcher, *, rows: int | None, say: Say) -> None:
        self.option = batch_size_option(job)
        self.total = count_rows(job.input)
        if not self.total:
            raise InputError(f"{job.input.path}: no rows to try batch sizes on")
        self._is_sample = rows is not None and rows < self.total
        self.rows = rows if rows is not None and self._is_sample else self.total
        self._job = with_rows(job, self.rows) if self._is_sample else job
        self._launcher = launcher
        self._say = say
        self._renderer = PromptRenderer(job)
        self.done: list[SizeResult] = []
        self.signum: int | None = None

    def run(self, batch_size: int, budget: Budget) -> SizeResult:
        """Raises:
        JobError: the first trial finds the job invalid, or its rows can't be read.
        """
        self._say(f"batch size {batch_size:,}: starting an engine")
        self.done.append(self._tried(batch_size, budget))
        return self.done[-1]

    def _tried(self, batch_size: int, budget: Budget) -> SizeResult:
        started = time.monotonic()
        job = with_size(self._job, self.option, batch_size)
        load_s = 0.0
        with closing(MemoryMeter()) as meter:
            try:
                with closing(open_engine(job, self._launcher)) as engine:
                    load_s = time.monotonic() - started
                    meter.follow(engine.pid if isinstance(engine, ProcessEngine) else None)
                    feed = Feed(job, engine, self._renderer, batch_size, budget, self._is_sample)
                    feed.run()
                    memory = meter.close()
            except (EngineError, JobError) as error:
                if not self.done and isinstance(error, JobError):
                    raise
                return SizeResult(
                    batch_size,
                    _status(error),
                    time.monotonic() - started,
                    load_s,
                    memory=meter.close(),
                    reason=_reason(error),
                )
        return SizeResult(
            batch_size,
            OK if feed.rounds else f"error: {_why_no_answer(feed, budget)}",
            time.monotonic() - started,
            load_s,
            tuple(feed.rounds),
            len(feed.answers),
            feed.failed,
            memory,
            feed.idle.read(),
        )


class MemoryMeter:
    """Start it before the engine is opened: memory in use on the GPUs then is not the engine's.

    Threads: one of ours samples twice a second, since asking a driver may take long; the trial's
    thread calls the methods. They share ``_pid`` and the two peaks.
    """

    def __init__(self) -> None:
        self._gpu_before = gpu_bytes()
        self._gpu_peak = self._host_peak = 0
        self._pid: int | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._look, name="memory-meter", daemon=True)
        self._thread.start()

    def follow(self, pid: int | None) -> None:
        """Set the engine's process, if it has its own; samples once now, as it may end soon."""
        if pid is not None:
            self._host_peak = family_bytes(pid)
        self._pid = pid

    def close(self) -> Memory | None:
        """Stop and return the peak; None if unknown. May be called twice."""
        self._closing.set()
        self._thread.join(timeout=10)
        if self._gpu_peak >= _LEAST_GPU_BYTES:
            return Memory(self._gpu_peak / 2**30, "gpu")
        return Memory(self._host_peak / 2**30, "host") if self._host_peak else None

    def _look(self) -> None:
        while True:
            is_last = self._closing.wait(INTERVAL_S)
            if self._gpu_before is not None and (now := gpu_bytes()) is not None:
                self._gpu_peak = max(self._gpu_peak, now - self._gpu_before)
            if self._pid is not None:
                self._host_peak = max(self._host_peak, family_bytes(self._pid))
            if is_last:
                return


def with_rows(job: JobConfig, rows: int) -> JobConfig:
    """The job with its first ``rows`` rows."""
    limit = rows if job.input.limit is None else min(rows, job.input.limit)
    return job.model_copy(update={"input": job.input.model_copy(update={"limit": limit})})


def _status(error: BatchkitError) -> str:
    if not isinstance(error, EngineDied):
        return f"error: {' '.join(str(error).split())}"
    is_oom = error.fault.kind == "oom" or error.fault.is_short_of_cache
    return OOM if is_oom else f"error: {error.fault}"


def _reason(error: BatchkitError) -> str:
    """In one line, without the name of the log, which is removed with the trial's folder."""
    match error:
        case StartFailed():
            reason = error.message
        case EngineDied():
            reason = str(error.fault)
        case _:
            reason = str(error)
    return " ".join(reason.split())


def _why_no_answer(feed: Feed, budget: Budget) -> str:
    if feed.failed:
        return f"all {feed.failed.total():,} rows failed; {feed.first_error}"
    return f"no row was answered within {budget.seconds:g} s (--seconds)"
