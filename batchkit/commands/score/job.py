"""Which job says what ``score`` scores, and how: the run's own, or that of a job file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from batchkit.config.loading import load_job
from batchkit.config.tables import JobConfig
from batchkit.errors import JobError
from batchkit.storage.job_toml import job_of_run


def check_scoring(job: JobConfig) -> None:
    """Raises JobError if ``job`` scores nothing."""
    if not job.scoring.is_on:
        raise JobError(
            "the job scores nothing: set [scoring] extract, reference and scorers, in the job file"
            " or by --set scoring.scorers='[\"em\"]' --set scoring.reference=FIELD"
        )


def check_overrides(overrides: Sequence[str]) -> None:
    """Raises JobError if one of them is about more than the scoring of a run, or which run it is."""
    for override in overrides:
        if not override.startswith(("scoring.", "name=", "output.dir=")):
            raise JobError(
                f"--set {override}: the rows are answered already; `score` takes only scoring.…, and"
                " name or output.dir to name the run"
            )


def job_to_score(folder: Path, named: Path | None, overrides: Sequence[str]) -> JobConfig:
    """The job of the run in ``folder``, with the scoring of the job file ``named``, if any.

    Raises:
        JobError: that scoring does not fit the run, whose own ``job.toml`` it becomes a part of.
    """
    if named is None:
        return job_of_run(folder, [o for o in overrides if o.startswith("scoring.")])
    job = job_of_run(folder).model_copy(update={"scoring": load_job(named, overrides).scoring})
    origin = f"{folder}, scored as {named} says"
    JobConfig.model_validate(job.model_dump(), context={"origin": origin})
    return job


def job_of_rows(named: Path | None, folder: Path | None, overrides: Sequence[str]) -> JobConfig:
    """The job whose input has the rows that predictions are for: a job file's, or a run's.

    Raises:
        JobError: neither is given.
    """
    if named is not None:
        return load_job(named, overrides)
    if folder is None:
        raise JobError(
            "--predictions needs the job: its rows, and how they are scored; name JOB (or a RUN)"
        )
    return job_of_run(folder, overrides)
