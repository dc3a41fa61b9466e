"""The door from Python: ``ProductionBatchProcessor``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Never, get_args

from batchkit.config.doings import doings, lines_of
from batchkit.config.loading import load_job, parse_job, resolve_paths
from batchkit.config.masking import UPLOAD
from batchkit.config.tables import JobConfig
from batchkit.engines.process.launcher import LOG
from batchkit.errors import BatchkitError, FailedRowsError, JobError
from batchkit.execution.lane import KeptEngine
from batchkit.execution.rollouts.function import Function, with_function
from batchkit.execution.run import start_run
from batchkit.execution.start import OnChange, Options
from batchkit.execution.summary import Outcome, RunSummary, notifying
from batchkit.rendering.renderer import AdjustSampling
from batchkit.runs.failures import lines_of as lines_of_failures
from batchkit.sources.input import Input, from_python
from batchkit.storage.job_toml import check_secrets

_IN_PYTHON = {  # patterns of command-line words in messages, and the words of a program
    r"--on-change (requeue|new)": r'on_change="\1"',
    "--fresh": "fresh=True",
    "--skip-from ": "skip_from=",
    r" \(--set name=…\)": "",
    r"--set (?=[\w.]+ ?=)": "",  # a key of the job and its value
}


class ProductionBatchProcessor:
    """Runs every row through a model and writes each finished row to disk, exactly once.

    Calling ``process`` again continues where the last call stopped; one processor makes one run at
    a time. Each call loads the model, except within ``with``, where the first one does::

        with ProductionBatchProcessor(job) as processor:
            for day in days:
                answers = processor.process(frames[day], name=day).to_pandas()

    The engine then prints to ``engine.log`` in a folder of its own, ``<output.dir>/<name>.engine``.
    With ``run.workers``, each call still starts its workers.

    Args:
        job: A JobConfig, or the path of a job file.
        fresh: Begin a new run at each call; the earlier one is kept in ``<name>.1``, ``.2`` …
        on_change: What to do if the job or its input is no longer what the run began with: raise
            ChangedError, begin a new run, or keep the records of unchanged rows and run the rest.
        skip_from: Skip rows that have an answer in this run folder.
        raise_on_failure: Raise FailedRowsError at the end of a call after which a row of the job is failed.
        quiet: Print nothing.
        adjust_sampling: Changes the sampling parameters of each row, its own included; not for
            ``run.workers`` or a pooling task. A resume can't compare functions: give a job with
            another one another name.
        rollout: ``async def solve(row, generate)`` in place of ``[rollout] function``; not for
            ``run.workers``. A resume compares its source, if that can be read.

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
        is_fixed = self.job.task != "generate" or self.job.rollout or self.job.run.workers
        if adjust_sampling is not None and is_fixed:
            raise JobError(
                'adjust_sampling: is for task = "generate" without a rollout, whose function gives each'
                " generation its parameters itself, and without run.workers, which get no function; leave"
                " it out, or give each row its own parameters (sampling.sampling_column)"
            )
        self._options = Options(
            fresh=fresh,
            on_change=on_change,
            skip_from=None if skip_from is None else Path(skip_from),
            quiet=quiet,
            adjust_sampling=adjust_sampling,
            rollout=rollout,
        )
        self._raise_on_failure = raise_on_failure
        self._kept: KeptEngine | None = None

    def __enter__(self) -> ProductionBatchProcessor:
        log = self.job.folder.with_name(f"{self.job.name}.engine") / LOG
        self._kept = KeptEngine(log)
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
        """Run the job's input, or ``rows``: prompts, chat messages, dicts of template fields, or a
        table (pandas, polars, ``datasets``, whatever gives an Arrow stream), whose NaN is None.

        A list of rows, or a table, resumes like a file. An iterator can't be compared with what an
        earlier call saw, so each call begins a new run; the old folder is moved aside. ``name``
        gives this call's run another name than the job's, and so a folder of its own.

        Raises:
            BatchkitError: the run stopped; everything finished is on disk. See ``errors``.
        """
        if others:
            raise TypeError(
                f"process() takes rows and name; {next(iter(others))} is for ProductionBatchProcessor(job, …)"
            )
        return self.start(rows, name=name).checked()

    def retry(
        self,
        attempts: Mapping[int, int],
        *,
        rows: Sequence[Any] | None = None,
        name: str | None = None,
    ) -> RunSummary:
        """Run the rows in ``attempts`` again, except those that have an answer by now.

        ``attempts`` maps a row's index to the number of its last attempt, 0 if it has no record
        yet. The other arguments, and errors, are as with ``process``.
        """
        return self.start(rows, name=name, attempts=attempts).checked()

    def start(
        self,
        rows: Iterable[Any] | None = None,
        *,
        name: str | None = None,
        attempts: Mapping[int, int] | None = None,
    ) -> Outcome:
        """As ``process``, or ``retry`` if there are ``attempts``, but an error that stops the run after it
        has begun is returned, with the summary of what is done."""
        job = self.job if name is None else _named(self.job, name)
        if rows is None and job.input.path is None:
            raise JobError("no rows: give some to process(), or set the job's input.path")
        source: Input | None = None
        if rows is not None:
            source = from_python(rows, job.input)
            named = job.input.model_copy(update={"id": source.id})
            job = job.model_copy(update={"input": named})
        for line in lines_of(doing for doing in doings(job) if doing.keys[0] != UPLOAD):
            self._say(line)
        if job.output.export or job.output.upload is not None:
            self._say(
                "output.export and output.upload: are done by `batchkit run` and `export`, not by process()"
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


def in_python(message: str) -> str:
    """Return ``message`` with Python's arguments in place of the command line's options."""
    for pattern, words in _IN_PYTHON.items():
        message = re.sub(pattern, words, message)
    return message


def _named(job: JobConfig, name: str) -> JobConfig:
    """Raises JobError if a run can't have that name."""
    checked = parse_job({"name": name, "engine": {"kind": "dry-run"}}, "process(name=…)").name
    return job.model_copy(update={"name": checked})
