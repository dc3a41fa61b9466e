"""A trial of one batch size: a run of the job's own rows in a scratch folder, stopped once it is measured."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path

from batchkit.commands.trial import Say, answers_in, scratch_folder, seconds_at, tried
from batchkit.commands.tuning.batch_size_option import batch_size_option, with_size
from batchkit.commands.tuning.bottleneck import idle_of
from batchkit.commands.tuning.rounds import Budget, Rounds
from batchkit.commands.tuning.table import OK, OOM, Memory, SizeResult, SizeTable
from batchkit.config.tables import EngineTable, JobConfig
from batchkit.engines.faults import EngineDied, StartFailed
from batchkit.engines.memory import family_bytes, gpu_bytes
from batchkit.engines.process.launcher import LOG
from batchkit.engines.registry import holds_model
from batchkit.errors import BatchkitError, EngineError, InputError, Interrupted, JobError
from batchkit.execution.kept_engine import KeptEngine
from batchkit.execution.signals import StopRequest
from batchkit.execution.start import Options
from batchkit.rendering.ordering import well_ordered
from batchkit.rendering.steps import renderer_of
from batchkit.sources import count_rows, never
from batchkit.sources.input import Input, from_job
from batchkit.storage.log import RESULTS
from batchkit.storage.metrics import read_metrics

LOOK_S, MEMORY_LOOK_S = 0.1, 0.5
VECTORS_LAG_S = 1.0  # records of vectors are written once a second
RENDER_ROWS, RENDER_S = 512, 5.0
_LEAST_GPU_BYTES = 64 * 2**20  # less than a CUDA context: the engine runs on the host


@contextmanager
def trials_of(job: JobConfig, *, rows: int | None, say: Say) -> Iterator[Trials]:
    """Trials in a folder that is removed at the end.

    A signal ends the ``with`` block early; ``signum`` of the trials is that signal's.

    Raises:
        JobError: the job itself is invalid.
        InputError: its input has no rows.
    """
    with StopRequest().installed(), scratch_folder("batchkit-trial-") as folder:
        trials = Trials(job, folder, rows=rows, say=say)
        try:
            yield trials
        except Interrupted as interrupted:
            trials.signum = interrupted.signum
        finally:
            trials.kept.close()


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
    """Trials of one job, one after the other, each with a new engine; ``done`` holds all of them.

    ``total``: rows of the job, of which the trials use the first ``rows``.
    """

    def __init__(self, job: JobConfig, folder: Path, *, rows: int | None, say: Say) -> None:
        self.option = batch_size_option(job)
        self.total = count_rows(job.input)
        if not self.total:
            raise InputError(f"{job.input.path}: no rows to try batch sizes on")
        self.rows = self.total if rows is None else min(rows, self.total)
        self.kept = KeptEngine(folder / LOG)  # its engines are forks of one process
        self._job = _of_trials(job, folder)
        self._source = self._first_rows(self.rows)
        self._renderer = renderer_of(job)
        self._say = say
        self.done: list[SizeResult] = []
        self.signum: int | None = None

    @property
    def table(self) -> SizeTable:
        engine = self._job.engine
        return SizeTable.of(
            self.done,
            name=self._job.name,
            model=engine.model or engine.kind,
            option=self.option.key,
            signum=self.signum,
        )

    def run(self, batch_size: int, budget: Budget) -> SizeResult:
        """Raises:
        JobError: the first trial finds the job invalid, or its rows can't be read.
        """
        self._say(f"batch size {batch_size:,}: starting an engine")
        self.done.append(self._tried(batch_size, budget))
        return self.done[-1]

    def rendered_per_s(self, seconds: float) -> float:
        """How fast the job's first rows are rendered, opening and downscaling images, for an engine that
        answers at once; 0 if none can be."""
        engine = EngineTable(kind="dry-run")
        task = "classify" if self._job.task == "embed" else self._job.task  # vectors cost an fsync
        rows = min(self.rows, RENDER_ROWS)
        rounds = self._rounds(max(1, rows // 8), Budget(min(RENDER_S, seconds)))
        job = self._job.model_copy(update={"name": "rendered", "engine": engine, "task": task})
        with closing(Watch(job, rounds)) as watch:
            self._start(job, self._first_rows(rows), watch)
        return sum(found.rows_per_s for found in rounds.cut(time.time(), is_sample=True))

    def _tried(self, batch_size: int, budget: Budget) -> SizeResult:
        job = with_size(self._job, self.option, batch_size)
        job = job.model_copy(update={"name": str(len(self.done))})
        rounds = self._rounds(batch_size, budget)
        status, reason, started = OK, "", time.time()
        with closing(Watch(job, rounds)) as watch:
            try:
                self._start(job, self._source, watch)
            except (EngineError, JobError) as error:
                if not self.done and not isinstance(error, EngineError):
                    raise
                status, reason = _status(error), _reason(error)
        ended = time.time()
        measured = rounds.cut(ended, is_sample=self.rows < self.total) if status == OK else []
        if status == OK and not measured:
            status = f"error: {_why_no_answer(rounds, budget)}"
        return SizeResult(
            batch_size,
            status,
            ended - started,
            max(0.0, watch.began - started),
            tuple(measured),
            len(rounds.answers),
            rounds.failed,
            watch.memory,
            idle_of(rounds, read_metrics(job.folder)),
            reason,
        )

    def _start(self, job: JobConfig, source: Input, watch: Watch) -> None:
        """Raises as ``tried``, but the end that ``watch`` asked for is none."""
        try:
            options = Options(command="trial", quiet=True)
            tried(job, source, options, kept=self.kept, stop=watch.stop)
        except Interrupted:
            if not watch.has_asked:
                raise
        finally:
            for loaded in self.kept.idle.values():
                loaded.engine.close()
            self.kept.idle.clear()

    def _rounds(self, batch_size: int, budget: Budget) -> Rounds:
        look_ahead = max(1, self._job.run.look_ahead)
        rows = well_ordered(self._source.read(never), self._renderer.hint, look_ahead)
        first = {row.index for row, _ in islice(rows, batch_size)}
        return Rounds(batch_size, budget, total=self.rows, first=first)

    def _first_rows(self, rows: int) -> Input:
        if rows == self.total:
            return from_job(self._job)
        table = self._job.input.model_copy(update={"limit": rows})
        return from_job(self._job.model_copy(update={"input": table}))


def _of_trials(job: JobConfig, folder: Path) -> JobConfig:
    """A death of the engine ends a trial; rows that fail do not."""
    run = job.run.of_part(
        workers=None, max_seconds=None, max_completion_tokens=None, max_host_gb=None
    )
    run = run.model_copy(update={"max_engine_restarts": 0, "check_rows": 0})
    output = job.output.model_copy(update={"dir": str(folder)})
    return job.model_copy(update={"run": run, "output": output})


class Watch:
    """Reads what the run of ``job`` writes, asks it to stop once it is measured, and samples the memory of
    this process and all that it started, if the engine holds a model.

    Threads: one of ours does all this; the trial's thread reads the results after ``close``.
    ``StopRequest.ask`` may come from any thread.
    """

    def __init__(self, job: JobConfig, rounds: Rounds) -> None:
        self._folder, self._rounds = job.folder, rounds
        self._lag_s = VECTORS_LAG_S if job.task == "embed" else 0.0
        self._samples_memory = holds_model(job.engine.kind)
        self.stop = StopRequest(drain_s=0)
        self.has_asked = False
        self.began = 0.0
        """When its engine was loaded, in seconds since the epoch; 0 if it was not."""
        self._end_of_log = 0
        self._gpu_before = gpu_bytes() if self._samples_memory else None
        self._gpu_peak = self._host_peak = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="trial-watch", daemon=True)
        self._thread.start()

    @property
    def memory(self) -> Memory | None:
        """The peak; None if unknown."""
        if self._gpu_peak >= _LEAST_GPU_BYTES:
            return Memory(self._gpu_peak / 2**30, "gpu")
        return Memory(self._host_peak / 2**30, "host") if self._host_peak else None

    def close(self) -> None:
        self._closing.set()
        self._thread.join(timeout=10)

    def _watch(self) -> None:
        next_memory_look = 0.0
        while True:
            is_last = self._closing.wait(LOOK_S)
            if self._samples_memory and time.monotonic() >= next_memory_look:
                self._look_at_memory()
                next_memory_look = time.monotonic() + MEMORY_LOOK_S
            self._read()
            if is_last:
                return
            if self.began and self._rounds.is_over(self.began, time.time() - self._lag_s):
                self.has_asked = True
                self.stop.ask(signal.SIGTERM, drain_s=0)

    def _read(self) -> None:
        if not self.began:  # the first line of its metrics is written when the model is loaded
            self.began = next((seconds_at(line.at) for line in read_metrics(self._folder)), 0.0)
        for answer, end in answers_in(self._folder / RESULTS, self._end_of_log):
            self._rounds.add(answer)
            self._end_of_log = end

    def _look_at_memory(self) -> None:
        self._host_peak = max(self._host_peak, family_bytes(os.getpid()))
        if self._gpu_before is not None and (now := gpu_bytes()) is not None:
            self._gpu_peak = max(self._gpu_peak, now - self._gpu_before)


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


def _why_no_answer(rounds: Rounds, budget: Budget) -> str:
    if rounds.failed:
        return f"all {rounds.failed.total():,} rows failed; {rounds.first_error}"
    return f"no row was answered within {budget.seconds:g} s (--seconds)"
