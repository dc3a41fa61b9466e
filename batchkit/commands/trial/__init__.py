"""Trials: short runs of a job with other settings, measured from their output files.

``find-bs`` and ``tune`` measure settings with ``Trials``. Each trial is an ordinary run, which is kept in the folder of
its command inside the job's run folder.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

from batchkit.commands.trial.measurement import (
    Figures,
    Idle,
    Measurement,
    answers_in,
    hung_s,
    idle_of,
    seconds_at,
    was_short,
)
from batchkit.config.tables import WITH_VECTORS, JobConfig
from batchkit.engines.faults import EngineDied, StartFailed
from batchkit.engines.memory import family_bytes, gpu_bytes
from batchkit.engines.process.launcher import LOG
from batchkit.engines.registry import holds_model
from batchkit.errors import EngineError, InputError, Interrupted, JobError
from batchkit.execution.engine_pool import EnginePool
from batchkit.execution.run import tried
from batchkit.execution.start import StartOptions
from batchkit.execution.stop import StopRequest
from batchkit.rendering.ordering import well_ordered
from batchkit.rendering.steps import renderer_of
from batchkit.sources import count_rows, never
from batchkit.sources.input import from_job, why_empty
from batchkit.storage.log import RESULTS
from batchkit.storage.metrics import read_metrics

OK, OOM = "ok", "OOM"
LOOK_S = 0.1
VECTORS_LAG_S = 1.0  # records of vectors are written once a second
_LEAST_GPU_BYTES = 64 * 2**20  # less than a CUDA context, so the engine does not use the GPU


class Memory(NamedTuple):
    """Peak memory use of a trial, in units of 2**30 bytes as in nvidia-smi, on the GPU or in the host's processes."""

    gb: float
    of: Literal["gpu", "host"]


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of one trial.

    - ``status``: ``ok``, ``OOM``, or ``error: …``. ``reason``: why an engine died, or "".
    - ``figures``: the measured rates; None unless the status is ok. ``answered``: number of answered rows.
    - ``seconds``: the whole trial, including ``load_s`` for loading the engine.
    - ``failed``: number of failed rows by kind of error.
    - ``memory``: peak memory use; None if unknown. ``idle``: why the engine was not busier; None if unknown.
    - ``is_short``: time ran out before the engine was full.
    """

    status: str
    reason: str
    seconds: float
    load_s: float = 0.0
    figures: Figures | None = None
    answered: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    memory: Memory | None = None
    idle: Idle | None = None
    is_short: bool = False


@contextmanager
def trials_of(job: JobConfig, rows: int | None, command: str) -> Iterator[Trials]:
    """Yield a ``Trials`` for the first ``rows`` rows of ``job``. Its runs are kept in ``trials_folder(job, command)``.

    A signal ends the ``with`` block early and is stored in ``Trials.signum``.

    Raises:
        JobError: The job itself is invalid, has several engines, or its engine answers without delay.
        InputError: The input has no rows.
    """
    if len(job.engine_names) > 1:
        raise JobError(
            "[engines]: only one engine can be measured; use a job that has only the steps of one engine"
        )
    if job.engine.kind == "dry-run" and not job.engine.options.get("latency_s"):
        raise JobError(
            'engine.kind = "dry-run" answers without delay, so there is no speed to measure; set the engine that'
            " will run the job (engine.options.latency_s simulates one)"
        )
    log = trials_folder(job, command) / LOG
    with (
        StopRequest().installed() as stop,
        closing(EnginePool(log)) as kept,  # its engines are forks of one process
    ):
        trials = Trials(job, rows, log.parent, kept, stop)
        try:
            yield trials
        except Interrupted as interrupted:
            trials.signum = interrupted.signum


def trials_folder(job: JobConfig, command: str) -> Path:
    """Return the folder for the runs of ``command``'s trials."""
    return job.folder / command


class Trials:
    """A series of trials of one job, each with a new engine, one after the other. ``total``: number of rows of the job;
    the trials use the first ``rows`` of them."""

    def __init__(
        self, job: JobConfig, rows: int | None, folder: Path, kept: EnginePool, stop: StopRequest
    ) -> None:
        self.total = count_rows(job.input)
        if not self.total:
            raise InputError(why_empty(job.input))
        self.rows = self.total if rows is None else min(rows, self.total)
        self.signum: int | None = None
        self._folder, self._kept, self._stop = folder, kept, stop
        self._source = from_job(job.with_keys(input={"limit": self.rows}))
        self._hint = renderer_of(job).hint
        self._number = 0

    def run(self, job: JobConfig, at_once: int, seconds: float, least: float = 0.0) -> Trial:
        """Measure ``job``: the job of this series with other settings and the name of the trial's run. It runs
        ``at_once`` requests concurrently. An earlier run with this name is kept with a number added to its name.

        The measurement takes at most ``seconds`` seconds, after as many seconds to fill the engine. It ends early
        when the rate is clearly below ``least`` rows per second.

        Raises:
            JobError: The first trial finds the job invalid, or its rows can't be read.
        """
        self._number += 1
        job = _of_trial(job, self._folder, self.rows)
        measurement = self._measurement(job, at_once, seconds, least)
        status, reason, started = OK, "", time.time()
        with closing(_Watch(job, measurement)) as watch:
            try:
                self._start(job, watch)
            except (EngineError, JobError) as error:
                if self._number == 1 and isinstance(error, JobError):
                    raise
                status, reason = _failure(error)
        ended, metrics = time.time(), read_metrics(job.folder)
        if status == OK and (silent_s := hung_s(measurement, metrics)):
            status = f"error: the engine hung: nothing was generated in the last {silent_s:.0f} s"
        is_sample = self.rows < self.total
        figures = measurement.figures(ended, is_sample=is_sample) if status == OK else None
        is_short = status == OK and was_short(measurement, figures, metrics)
        if status == OK and figures is None:
            status = f"error: {_why_no_answer(measurement)}"
        return Trial(
            status,
            reason,
            ended - started,
            max(0.0, watch.began - started),
            figures,
            len(measurement.answers),
            measurement.failed,
            watch.memory,
            None if job.has_several else idle_of(measurement, metrics),
            is_short,
        )

    def _measurement(
        self, job: JobConfig, at_once: int, seconds: float, least: float
    ) -> Measurement:
        rows = well_ordered(self._source.read(never), self._hint, job.run.look_ahead)
        first = {row.index for row, _ in islice(rows, at_once)}
        return Measurement(at_once, seconds, total=self.rows, first=first, least=least)

    def _start(self, job: JobConfig, watch: _Watch) -> None:
        """Run the trial's job. Raises the same exceptions as ``tried``, unless ``watch`` stopped the run because the
        measurement was complete."""
        try:
            options = StartOptions(command="trial", quiet=True, fresh=True)
            tried(job, self._source, options, kept=self._kept, stop=watch.stop)
        except Interrupted:
            if watch.stop.signum is None:
                raise
        finally:
            self._kept.close_idle()
            if self._stop.signum is not None:  # a run interrupted by a signal may end in any state
                raise Interrupted(self._stop.signum)


def _of_trial(job: JobConfig, folder: Path, rows: int) -> JobConfig:
    """Return the job for one trial. Its run stops when the engine dies, but continues when rows fail."""
    return job.as_part(
        input={"limit": rows},
        engine={"in_process": False},
        run={"max_engine_restarts": 0, "check_rows": 0, "max_host_gb": None},
        output={"dir": str(folder)},
    )


class _Watch:
    """A thread that follows a trial: it reads the finished rows from the log, samples memory, and stops the run when
    the measurement is complete. Memory is that of this process and all its children, if the engine holds a model. Read
    the results only after ``close``."""

    def __init__(self, job: JobConfig, measurement: Measurement) -> None:
        self._folder, self._measurement = job.folder, measurement
        self._lag_s = VECTORS_LAG_S if job.task in WITH_VECTORS else 0.0
        self._samples_memory = holds_model(job.engine.kind)
        self.stop = StopRequest(drain_s=0)
        self.began = 0.0
        """When the engine was loaded, in seconds since 1970; 0 if the engine was not loaded."""
        self._end_of_log = 0
        self._gpu_before = gpu_bytes() if self._samples_memory else None
        self._gpu_peak = self._host_peak = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="trial-watch", daemon=True)
        self._thread.start()

    @property
    def memory(self) -> Memory | None:
        if self._gpu_peak >= _LEAST_GPU_BYTES:
            return Memory(self._gpu_peak / 2**30, "gpu")
        return Memory(self._host_peak / 2**30, "host") if self._host_peak else None

    def close(self) -> None:
        self._closing.set()
        self._thread.join(timeout=10)

    def _watch(self) -> None:
        n_looks = 0
        while True:
            is_last = self._closing.wait(LOOK_S)
            if self._samples_memory and n_looks % 5 == 0:
                self._look_at_memory()
            n_looks += 1
            self._read()
            if is_last:
                return
            if self.began and self._measurement.is_over(self.began, time.time() - self._lag_s):
                self.stop.ask(signal.SIGTERM, drain_s=0)

    def _read(self) -> None:
        if not self.began:  # the run writes the first line of metrics when the model is loaded
            self.began = next((seconds_at(line.at) for line in read_metrics(self._folder)), 0.0)
        for answer, end in answers_in(self._folder / RESULTS, self._end_of_log):
            self._measurement.add(answer)
            self._end_of_log = end

    def _look_at_memory(self) -> None:
        self._host_peak = max(self._host_peak, family_bytes(os.getpid()))
        if self._gpu_before is not None and (now := gpu_bytes()) is not None:
            self._gpu_peak = max(self._gpu_peak, now - self._gpu_before)


def _failure(error: EngineError | JobError) -> tuple[str, str]:
    """Return the status of a trial whose engine failed, and the reason in one line."""
    match error:
        case StartFailed():
            text = error.message
        case EngineDied():
            text = str(error.fault)
        case _:
            text = str(error)
    reason = " ".join(text.split())
    fault = error.fault if isinstance(error, EngineDied) else None
    if fault is not None and (fault.kind == "oom" or fault.is_short_of_cache):
        return OOM, reason
    return f"error: {reason}", reason


def _why_no_answer(measurement: Measurement) -> str:
    if measurement.failed:
        return f"all {measurement.failed.total():,} rows failed; the first error: {measurement.first_error}"
    return f"no row was answered within {measurement.seconds:g} s; raise --seconds"
