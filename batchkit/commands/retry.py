"""The ``retry-failed`` command: resubmits the failed rows of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from batchkit.commands import Say
from batchkit.commands.run import planned, started
from batchkit.commands.trust import vouched
from batchkit.config.loading import load_job, masked_override
from batchkit.config.masking import masked_keys
from batchkit.config.tables import JobConfig
from batchkit.errors import EngineCrashError, JobError, RowOutOfMemoryError
from batchkit.execution.start import StartOptions
from batchkit.execution.summary import RunSummary
from batchkit.rendering.templates.prompt import constant_files
from batchkit.storage.checkpoint import check_log
from batchkit.storage.identity import differences, identity
from batchkit.storage.job_toml import job_of_run, with_secrets_of, without_masked
from batchkit.storage.lines import failure_kind
from batchkit.storage.log import RESULTS
from batchkit.storage.newest_lines import read_newest
from batchkit.storage.runfolder import JOB
from batchkit.storage.starts import current_manifest

_LETHAL = (EngineCrashError.kind, RowOutOfMemoryError.kind)


class Retry(NamedTuple):
    """The result of ``retry-failed``: of the ``rows`` retried, ``recovered`` now have an answer. ``kinds``: the failure
    kinds that were retried; empty means all. ``summary`` is None if there was nothing to retry."""

    kinds: Sequence[str]
    rows: int = 0
    by_kind: Mapping[str, int] = MappingProxyType({})
    recovered: int = 0
    summary: RunSummary | None = None

    @property
    def exit_code(self) -> int:
        return 0 if self.summary is None else self.summary.exit

    def to_json(self) -> dict[str, Any]:
        found = {"rows": self.rows, "by_kind": dict(self.by_kind), "recovered": self.recovered}
        return found | ({} if self.summary is None else self.summary.to_json())

    def to_text(self) -> str:
        if self.summary is None:
            return "nothing to retry: no row failed" + f" by {', '.join(self.kinds)}" * bool(
                self.kinds
            )
        by_kind = ", ".join(f"{count} {kind}" for kind, count in self.by_kind.items())
        return f"retried {self.rows} rows ({by_kind}): {self.recovered} recovered"


def retry_failed(
    folder: Path,
    *,
    kinds: Sequence[str] = (),
    overrides: Sequence[str] = (),
    job_file: Path | None = None,
    trust: bool = False,
    say: Say = print,
) -> Retry:
    """Retry rows whose newest record is a failure, or an answer without text (failure kind ``empty``).

    - ``kinds``: retry only these failure kinds.
    - ``overrides``: settings for this start only; the start's note records them.
    - ``job_file``: the user's job file. Only its secrets are used, because the run's ``job.toml`` has none; ``say``
      reports other differences. Without it, secrets come from ``overrides`` or the environment.
    - ``trust``: allow the job to execute code, import functions and send keys (see ``vouched``).
    """
    _check_overrides(overrides, folder)
    then = current_manifest(folder).identity
    check_log(folder)
    due = due_rows(folder, kinds)
    if not due.attempts:
        return Retry(kinds)
    given = None if job_file is None else load_job(job_file)
    if given is not None and (changes := differences(then, identity(given, constant_files(given)))):
        say(
            f"{job_file} has changed since the run began: {'; '.join(changes)}. The retry ignores the change. To use"
            f" the new value, give it with --set, or start `batchkit run {job_file} --on-change requeue`"
        )
    begun = job_of_run(folder)
    job = job_of_run(folder, overrides)
    job = vouched(job, say, trust=trust, named=job_file, overrides=overrides)
    _check_answerable(job, begun, folder)
    options = StartOptions(
        attempts=due.attempts,
        quarantined=due.quarantined,
        begun_with=_with_secrets_of_job_file(begun, given),
        overrides=overrides,
        command="retry-failed",
    )
    end = planned(job)
    job = with_secrets(job, given, say)
    summary = started(job, options, end, say, scored_as=begun).checked()
    recovered = sum(
        record["index"] in due.attempts and failure_kind(record) is None
        for record in read_newest(folder / RESULTS)
    )
    return Retry(kinds, len(due.attempts), due.by_kind, recovered, summary)


class Due(NamedTuple):
    """The rows to retry. ``attempts``: number of the last attempt, by row index. ``quarantined``: rows that killed an
    engine and must run alone. ``by_kind``: number of rows by kind of failure."""

    attempts: dict[int, int]
    quarantined: set[int]
    by_kind: Counter[str]


def due_rows(folder: Path, kinds: Sequence[str] = (), before: str | None = None) -> Due:
    """Return the rows whose newest record is a failure.

    ``kinds``: only these kinds of failure; empty means all. ``before``: only records that finished before this time.
    """
    due = Due({}, set(), Counter())
    for record in read_newest(folder / RESULTS):
        kind = failure_kind(record)
        if before is not None and record["finished_at"] >= before:
            continue
        if kind is not None and (not kinds or kind in kinds):
            due.attempts[record["index"]] = record.get("attempt") or 1
            due.by_kind[kind] += 1
            if kind in _LETHAL:
                due.quarantined.add(record["index"])
    return due


def _check_overrides(overrides: Sequence[str], folder: Path) -> None:
    """Raise JobError if an override sets a key that a retry can't change."""
    for override in overrides:
        key, setting = override.partition("=")[0].strip(), masked_override(override)
        if key.partition(".")[0] == "scoring":
            raise JobError(
                f"--set {setting}: a retry can't change the scoring, because all rows of a run are scored alike;"
                f" `batchkit score {folder} --set {setting}` scores all rows again"
            )
        if key.startswith("input") and key != "input.path":
            raise JobError(
                f"--set {setting}: a retry can't change which rows the run has; in [input], a retry may only"
                " set path, for an input that was moved"
            )


def _check_answerable(job: JobConfig, begun: JobConfig, folder: Path) -> None:
    """Raise JobError if ``job`` must not answer rows of the run that was started with the job ``begun``."""
    if job.engine.kind == "dry-run" != begun.engine.kind:
        raise JobError(
            "--set engine.kind=dry-run: the dry-run engine has no model, and its text would be mixed with the"
            f" answers of {folder}; to try the job, give it another name: batchkit run"
            f" {folder / JOB} --set engine.kind=dry-run --set name=trial"
        )
    if job.input.path is None:
        raise JobError(
            f"{folder}: its rows came from Python, so retry them in the program that has these rows, with"
            f" processor.retry({{index: attempt}}, rows=rows); `batchkit show --failed {folder}` lists the failed rows"
        )


def with_secrets(job: JobConfig, given: JobConfig | None, say: Say) -> JobConfig:
    """Return ``job`` with all available secrets filled in, and without keys whose secrets are unavailable. ``say``
    reports these."""
    job = _with_secrets_of_job_file(job, given)
    known = without_masked(job)
    gone = sorted({*masked_keys(job.model_dump())} - {*masked_keys(known.model_dump())})
    if gone:
        say(
            f"{', '.join(gone)}: this retry runs without the value, which is a secret that the run folder does not"
            " store; if the job needs it, give the job file instead of the run folder, or --set KEY=VALUE"
        )
    return known


def _with_secrets_of_job_file(job: JobConfig, given: JobConfig | None) -> JobConfig:
    """Return ``job`` with the secrets of the user's job file ``given``, unless it is None."""
    return job if given is None else with_secrets_of(job, given)
