"""The ``retry-failed`` command: resubmits the failed rows of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from batchkit.commands import Say
from batchkit.commands.run import AtEnd, planned, started
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
from batchkit.storage.manifest import read_manifest
from batchkit.storage.newest_lines import read_newest
from batchkit.storage.runfolder import JOB

_LETHAL = (EngineCrashError.kind, RowOutOfMemoryError.kind)


class Retry(NamedTuple):
    """The result of ``retry-failed``: ``recovered`` of the ``rows`` succeeded.

    ``kinds``: the failure kinds to retry; empty means all. ``summary`` is None if no row had failed.
    """

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
    """Retry rows whose newest record failed, or succeeded with a blank answer.

    ``kinds`` limits the retry to these failure kinds; a blank ok record has kind ``empty``. ``overrides`` apply to
    this start only and are recorded in the manifest. The run's ``job.toml`` has no secrets: they come from
    ``job_file``, else from ``overrides`` or the environment. Other settings of ``job_file`` are ignored; ``say``
    reports differences. ``vouched`` decides whether the job may execute code, import functions or send keys.
    """
    _check_overrides(overrides, folder)
    then = read_manifest(folder).identity
    check_log(folder)
    due = _due(folder, kinds)
    if not due.attempts:
        return Retry(kinds)
    given = None if job_file is None else load_job(job_file)
    if given is not None and (changes := differences(then, identity(given, constant_files(given)))):
        say(
            f"{job_file} has changed since the run began, and a retry keeps to the run's own job:"
            f" {'; '.join(changes)}. To use the change, give it with --set, or `batchkit run"
            f" {job_file} --on-change requeue`"
        )
    begun = job_of_run(folder)
    job = job_of_run(folder, overrides)
    job = vouched(job, say, trust=trust, named=job_file, overrides=overrides)
    _check_answerable(job, begun, folder)
    options = StartOptions(
        attempts=due.attempts,
        quarantined=due.quarantined,
        begun_with=_filled(begun, given),
        overrides=overrides,
        command="retry-failed",
    )
    end = planned(job) if job.output.export else AtEnd((), None)
    job = _with_secrets(job, given, say)
    summary = started(job, options, end, say, scored_as=begun).checked()
    recovered = sum(
        record["index"] in due.attempts and failure_kind(record) is None
        for record in read_newest(folder / RESULTS)
    )
    return Retry(kinds, len(due.attempts), due.by_kind, recovered, summary)


class _Due(NamedTuple):
    """The rows to retry: their last attempt number by index, and the rows that killed an engine."""

    attempts: dict[int, int]
    quarantined: set[int]
    by_kind: Counter[str]


def _due(folder: Path, kinds: Sequence[str]) -> _Due:
    due = _Due({}, set(), Counter())
    for record in read_newest(folder / RESULTS):
        kind = failure_kind(record)
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
                f"--set {setting}: a run is scored in one way; `batchkit score {folder} --set"
                f" {setting}` scores all of it again"
            )
        if key.startswith("input") and key != "input.path":
            raise JobError(
                f"--set {setting}: a retry finds the rows of the run as the run did;"
                " only input.path may differ, for an input that was moved"
            )


def _check_answerable(job: JobConfig, begun: JobConfig, folder: Path) -> None:
    """Raise JobError if ``job`` can't answer rows of the run started with job ``begun``."""
    if job.engine.kind == "dry-run" != begun.engine.kind:
        raise JobError(
            "--set engine.kind=dry-run: the dry-run engine has no model, and its text would be mixed with the"
            f" answers of {folder}; to try the job, give it another name: batchkit run"
            f" {folder / JOB} --set engine.kind=dry-run --set name=trial"
        )
    if job.input.path is None:
        raise JobError(
            f"{folder}: its rows came from Python, and only a program has them: run them again there, with"
            f" processor.retry({{index: attempt}}, rows=rows); `batchkit show --failed {folder}` lists them"
        )


def _with_secrets(job: JobConfig, given: JobConfig | None, say: Say) -> JobConfig:
    """Return ``job``, read from its ``job.toml``, with all available secrets filled in."""
    job = _filled(job, given)
    known = without_masked(job)
    gone = sorted({*masked_keys(job.model_dump())} - {*masked_keys(known.model_dump())})
    if gone:
        say(
            f"not set, because run folders store no secrets: {', '.join(gone)}; if needed, name"
            " the job file instead of the run folder, or give it with --set"
        )
    return known


def _filled(job: JobConfig, given: JobConfig | None) -> JobConfig:
    """Return ``job`` with the secrets of ``given``, if any."""
    return job if given is None else with_secrets_of(job, given)
