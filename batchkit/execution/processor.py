"""The Python interface: ``ProductionBatchProcessor``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Never, get_args

from batchkit.config.doings import EXPORT, doings, lines_of
from batchkit.config.loading import load_job, parse_job, resolve_paths
from batchkit.config.tables import JobConfig
from batchkit.engines.process.launcher import LOG
from batchkit.errors import BatchkitError, FailedRowsError, JobError
from batchkit.execution.engine_pool import EnginePool
from batchkit.execution.rollouts.function import Function, with_function
from batchkit.execution.run import start_run
from batchkit.execution.start import OnChange, StartOptions
from batchkit.execution.summary import Outcome, RunSummary, notifying
from batchkit.rendering.renderer import AdjustSampling
from batchkit.runs.failures import lines_of as lines_of_failures
from batchkit.sources.input import Input, from_python
from batchkit.storage.job_toml import check_secrets

_IN_PYTHON = {  # patterns of command-line options in messages, and the Python arguments that replace them
    r"--on-change (requeue|new)": r'on_change="\1"',
    "--fresh": "fresh=True",
    "--skip-from ": "skip_from=",
    r" \(--set name=…\)": "",
    r"--set (?=[\w.]+ ?=)": "",  # a key of the job and its value
}


class ProductionBatchProcessor:
    """A processor that runs every row through a model and writes each finished row to disk, exactly once.

    Calling ``process`` again resumes where the last call stopped. A processor makes one run at
    a time. Each call loads the model; inside ``with``, only the first call does::

        with ProductionBatchProcessor(job) as processor:
            for day in days:
                answers = processor.process(frames[day], name=day).to_pandas()

    Inside ``with``, the engine prints to ``<output.dir>/<name>.engine/engine.log``.
    With ``workers.count``, each call still starts its workers.

    Args:
        job: A JobConfig, or the path of a job file.
        fresh: Begin a new run at each call; the earlier one is kept in ``<name>.1``, ``.2`` …
        on_change: What to do if the job or its input has changed since the run began: raise
            ChangedError, begin a new run, or keep the records of unchanged rows and run the rest.
        skip_from: Skip rows that have an answer in this run folder.
        raise_on_failure: Raise FailedRowsError at the end of a call if a row of the job has failed.
        quiet: Print nothing.
        adjust_sampling: Function that changes the sampling parameters of each row. Not allowed with
            ``workers.count`` or a pooling task. A resume can't compare functions: after a change of the
            function, give the job another name.
        rollout: ``async def solve(row, generate)``, used instead of ``[rollout] function``. Not allowed
            with ``workers.count``. A resume compares the source code of the function, if Python can read it.

    Raises:
        JobError: the job file can't be read, or its keys are wrong.
    """

    def __init__(
        self,
        job: JobConfig | str | Path,
        *,
        fresh: bool = False,
        on_change: OnChange = "fail",
        skip_from: str | Path | None = None,
        raise_on_failure: bool = False,
        quiet: bool = False,
        adjust_sampling: AdjustSampling | None = None,
        rollout: Function | None = None,
    ) -> None:
        if not isinstance(job, JobConfig | str | Path):
            raise JobError(
                f"job: found {type(job).__name__}, expected a JobConfig or the path of a job file"
                + "; from a dict: JobConfig(**job)" * isinstance(job, dict)
            )
        if on_change not in (choices := get_args(OnChange)):
            raise JobError(
                f"on_change: found {on_change!r}, expected {' or '.join(map(repr, choices))}"
            )
        self.job = (
            resolve_paths(job, Path.cwd()) if isinstance(job, JobConfig) else load_job(Path(job))
        )
        check_secrets(self.job)
        if rollout is not None:
            self.job = with_function(self.job, rollout)
        if adjust_sampling is not None and (obstacle := _why_not_adjusted(self.job)):
            raise JobError(f"adjust_sampling can't be used with {obstacle}")
        self._options = StartOptions(
            fresh=fresh,
            on_change=on_change,
            skip_from=None if skip_from is None else Path(skip_from),
            quiet=quiet,
            adjust_sampling=adjust_sampling,
            rollout=rollout,
        )
        self._raise_on_failure = raise_on_failure
        self._kept: EnginePool | None = None

    def __enter__(self) -> ProductionBatchProcessor:
        log = self.job.folder.with_name(f"{self.job.name}.engine") / LOG
        self._kept = EnginePool(log)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def process(
        self, rows: Iterable[Any] | None = None, *, name: str | None = None, **others: Never
    ) -> RunSummary:
        """Run the job's input, or ``rows``.

        ``rows`` are prompts, chat messages, dicts of template fields, or a table (pandas, polars, ``datasets``, any
        object with an Arrow stream). NaN in a table becomes None. A list or a table can be resumed like a file. An
        iterator can't be compared with the rows of an earlier call, so each call begins a new run and moves the old
        folder aside.

        ``name``: name of this call's run instead of the job's. It also decides the run folder.

        Raises:
            BatchkitError: the run stopped; every finished row is on disk. See ``errors``.
        """
        if others:
            raise TypeError(
                f"process() takes rows and name; pass {next(iter(others))} to ProductionBatchProcessor(job, …)"
            )
        return self.start(rows, name=name).checked()

    def retry(
        self,
        attempts: Mapping[int, int],
        *,
        rows: Sequence[Any] | None = None,
        name: str | None = None,
    ) -> RunSummary:
        """Run the rows in ``attempts`` again, except rows that already have an answer.

        ``attempts``: by row index, the number of the row's last attempt; 0 if the row has no record yet. The other
        arguments and the exceptions are those of ``process``.
        """
        return self.start(rows, name=name, attempts=attempts).checked()

    def start(
        self,
        rows: Iterable[Any] | None = None,
        *,
        name: str | None = None,
        attempts: Mapping[int, int] | None = None,
    ) -> Outcome:
        """Run like ``process``, but put an error into the outcome instead of raising it. With ``attempts``, run like
        ``retry``.

        An error before the run has begun is still raised. The outcome also has the summary of the finished rows.
        """
        job = self.job if name is None else _named(self.job, name)
        if rows is None and job.input.path is None:
            raise JobError("no rows: pass rows to process(), or set the job's input.path")
        source: Input | None = None
        if rows is not None:
            source = from_python(rows, job.input)
            job = job.with_keys(input={"id": source.id})
        for line in lines_of(doing for doing in doings(job) if doing.keys[0] != EXPORT):
            self._say(line)
        if job.output.export:
            self._say(
                "output.export: process() ignores this key; use `batchkit run` or `batchkit export`"
            )
        try:
            with notifying(job, self._say) as ended:
                options = replace(self._options, attempts=attempts)
                outcome = start_run(job, source, options, kept=self._kept)
                ended(outcome.summary)
            summary = outcome.summary
            reasons = [
                *lines_of_failures(summary.failures, summary.folder, was_retry=attempts is not None)
            ]
            for line in reasons:
                self._say(line)
            if self._raise_on_failure and summary.failed and outcome.error is None:
                error = FailedRowsError(
                    f"{summary.failed:,} of {summary.total:,} rows failed\n" + "\n".join(reasons)
                )
                return Outcome(summary, error)
            if outcome.error is not None:
                outcome.error.args = (in_python(str(outcome.error)),)
            return outcome
        except BatchkitError as error:
            error.args = (in_python(str(error)),)
            raise

    def _say(self, text: str) -> None:
        if not self._options.quiet:
            print(f"batchkit: {in_python(text)}", file=sys.stderr)


def _why_not_adjusted(job: JobConfig) -> str:
    if job.task != "generate":
        return f'task = "{job.task}", which samples nothing; leave it out'
    if job.rollout is not None:
        return "a rollout; its function passes the sampling parameters of each generation to `generate`"
    if job.workers.count:
        return "workers.count; give each row its own parameters (sampling.sampling_column)"
    return ""


def in_python(message: str) -> str:
    """Return ``message`` with options of the command line replaced by the corresponding arguments in Python."""
    for pattern, words in _IN_PYTHON.items():
        message = re.sub(pattern, words, message)
    return message


def _named(job: JobConfig, name: str) -> JobConfig:
    """Return ``job`` with another name. Raises JobError if the name is invalid."""
    checked = parse_job({"name": name, "engine": {"kind": "dry-run"}}, "process(name=…)").name
    return job.with_keys(name=checked)
