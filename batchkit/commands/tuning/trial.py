"""One trial: a fresh engine that gets the job's own rows as in a run, and is measured."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from batchkit.commands.scratch import scratch_folder
from batchkit.commands.tuning.batch_size_option import BatchSizeOption, with_size
from batchkit.commands.tuning.feed import Fed, feed
from batchkit.commands.tuning.idle import Idle
from batchkit.commands.tuning.memory import Memory, MemoryMeter
from batchkit.commands.tuning.rounds import Budget, Round
from batchkit.config.tables import JobConfig
from batchkit.engines.faults import EngineDied, StartFailed
from batchkit.engines.process.engine import ProcessEngine
from batchkit.engines.process.launcher import LOG, Launcher
from batchkit.engines.registry import open_engine
from batchkit.errors import BatchkitError, EngineError, JobError
from batchkit.rendering.renderer import PromptRenderer

OK, OOM = "ok", "OOM"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Trial:
    """The result for one batch size: ``status`` is ``ok``, ``OOM``, or ``error: …``.

    ``rounds`` is empty unless it is ok. ``seconds``: the whole trial, including
    ``load_s`` for loading the engine. ``failed``: rows by kind of error. ``reason``: why an engine
    died.
    """

    batch_size: int
    status: str
    seconds: float
    load_s: float = 0.0
    rounds: tuple[Round, ...] = ()
    answered: int = 0
    failed: Counter[str] | None = None
    memory: Memory | None = None
    idle: Idle | None = None
    reason: str = ""

    @property
    def is_ok(self) -> bool:
        return self.status == OK

    @property
    def is_typical(self) -> bool:
        """The engine was as busy as in the whole job."""
        return bool(self.rounds) and all(found.is_typical for found in self.rounds)


@contextmanager
def trials_of(
    job: JobConfig, option: BatchSizeOption, *, rows: int | None, say: Say
) -> Iterator[Trials]:
    """Trials whose engines print to a folder that is removed at the end."""
    with (
        scratch_folder("batchkit-trial-") as folder,
        closing(Launcher(folder / LOG)) as launcher,
    ):
        yield Trials(job, option, launcher, rows=rows, say=say)


class Trials:
    """Trials of one job, one after the other.

    ``done`` holds all of them. They use the first ``rows`` rows of the job.
    """

    def __init__(
        self,
        job: JobConfig,
        option: BatchSizeOption,
        launcher: Launcher,
        *,
        rows: int | None,
        say: Say,
    ) -> None:
        self._is_sample = rows is not None
        self._job = job if rows is None else with_rows(job, rows)
        self._option = option
        self._launcher = launcher
        self._say = say
        self._renderer = PromptRenderer(job)
        self.done: list[Trial] = []

    def run(self, batch_size: int, budget: Budget) -> Trial:
        """Raises:
        JobError: the first trial finds the job invalid, or its rows can't be read.
        """
        self._say(f"batch size {batch_size:,}: starting an engine")
        trial = self._tried(batch_size, budget)
        self.done.append(trial)
        return trial

    def _tried(self, batch_size: int, budget: Budget) -> Trial:
        started = time.monotonic()
        job = with_size(self._job, self._option, batch_size)
        load_s = 0.0
        with closing(MemoryMeter()) as meter:
            try:
                with closing(open_engine(job, self._launcher)) as engine:
                    load_s = time.monotonic() - started
                    meter.follow(engine.pid if isinstance(engine, ProcessEngine) else None)
                    fed = feed(
                        job,
                        engine,
                        self._renderer,
                        batch_size,
                        budget,
                        is_sample=self._is_sample,
                    )
                    memory = meter.close()
            except (EngineError, JobError) as error:
                if not self.done and isinstance(error, JobError):
                    raise
                took_s = time.monotonic() - started
                return Trial(
                    batch_size,
                    _status(error),
                    took_s,
                    load_s,
                    memory=meter.close(),
                    reason=_reason(error),
                )
        status = OK if fed.rounds else f"error: {_why_no_answer(fed, budget)}"
        took_s = time.monotonic() - started
        return Trial(
            batch_size,
            status,
            took_s,
            load_s,
            tuple(fed.rounds),
            fed.answered,
            fed.failed,
            memory,
            fed.idle,
        )


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


def _why_no_answer(fed: Fed, budget: Budget) -> str:
    if fed.failed:
        return f"all {fed.failed.total():,} rows failed; {fed.error}"
    return f"no row was answered within {budget.seconds:g} s (--seconds)"
