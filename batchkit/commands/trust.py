"""Whom a job is taken from: what it executes, imports or sends is said first, and is the user's own.

A run folder may come from anybody. What its ``job.toml`` would execute, import or send a key to is done only if
the user's job file, or the command line, says the same; or with ``--trust``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from batchkit.commands import Say
from batchkit.config.doings import ON_END, OPTIONAL, Doing, doings, lines_of
from batchkit.config.loading import load_job
from batchkit.config.masking import UPLOAD, masked
from batchkit.config.tables import JobConfig
from batchkit.errors import JobError
from batchkit.storage.manifest import place_of_job, read_manifest
from batchkit.storage.runfolder import JOB, is_of_run, is_run


def vouched(
    job: JobConfig,
    say: Say,
    *,
    of: tuple[str, ...] = ("",),
    trust: bool = False,
    fresh: bool = False,
    named: Path | None = None,
    overrides: Sequence[str] = (),
) -> JobConfig:
    """``job``, once ``say`` has what it executes, imports and sends, of the keys that begin with one ``of``
    these. If it is a run folder's, ``named`` is the user's job file, by default the one that the manifest names;
    what is ``OPTIONAL`` and not there is left out. ``fresh``: a new run begins.

    Raises:
        JobError: the job file does not say the same, or a key would go to another host than the run's.
    """
    due = doings(job, of)
    if due and not trust and (not job.made_in or is_of_run(Path(job.made_in))):
        folder = Path(job.made_in).parent if job.made_in else job.folder
        file = place_of_job(folder) if named is None or is_of_run(named) else named
        job = _as_in_job_file(job, due, folder, file, overrides, say)
        due = doings(job, of)
    if not (trust or fresh):
        _check_hosts(job.folder, due)
    for line in lines_of(due):
        say(line)
    return job


def _as_in_job_file(
    job: JobConfig,
    due: Sequence[Doing],
    folder: Path,
    file: Path | None,
    overrides: Sequence[str],
    say: Say,
) -> JobConfig:
    try:
        theirs = None if file is None else load_job(file, overrides)
    except JobError:  # gone, or no longer a job
        theirs = None
    said = [] if theirs is None else doings(theirs)
    known = {*said, *(doing._replace(what=masked(doing.what)) for doing in said)}
    given = {override.partition("=")[0].strip() for override in overrides}
    foreign = [doing for doing in due if doing not in known and not given.issuperset(doing.keys)]
    why = f"only {folder / JOB} says so" if theirs is None else f"{file} says otherwise"
    if refused := [doing.line for doing in foreign if doing.keys[0] not in OPTIONAL]:
        lines = "\n".join(f"  {line}" for line in refused)
        raise JobError(
            f"{why}, and nothing that a run folder holds is executed, imported or sent a key:\n{lines}\nName"
            " the job file that says it, or give --trust to do it"
        )
    for doing in foreign:
        (key,) = doing.keys
        say(f"{key} is left out, for {why} (--trust {OPTIONAL[key]} it): {doing.line}")
    return _with_optional(job, job if theirs is None else theirs, given, foreign)


def _with_optional(
    job: JobConfig, theirs: JobConfig, given: Collection[str], foreign: Sequence[Doing]
) -> JobConfig:
    """``job`` with what is ``OPTIONAL`` as the user has it: as ``given``, else as in ``theirs``; without the ``foreign``."""
    left_out = {doing.keys[0] for doing in foreign}
    on_end = (job if ON_END in given else theirs).run.on_end
    upload = (job if UPLOAD in given else theirs).output.upload
    run = job.run.model_copy(update={"on_end": None if ON_END in left_out else on_end})
    output = job.output.model_copy(update={"upload": None if UPLOAD in left_out else upload})
    return job.model_copy(update={"run": run, "output": output})


def _check_hosts(folder: Path, due: Sequence[Doing]) -> None:
    sent = [doing for doing in due if doing.host is not None]
    recorded = read_manifest(folder).hosts if sent and is_run(folder) else {}
    for doing in sent:
        host = recorded.get(doing.keys[0].removesuffix(".base_url"), doing.host)
        if host != doing.host:
            raise JobError(
                f"{doing.line}, and its run asked {host} so far; if that is meant, give --trust"
            )
