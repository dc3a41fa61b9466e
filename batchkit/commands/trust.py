"""Protection against jobs of other people. batchkit prints what a job executes, imports or sends.

A run folder may come from anyone. If its ``job.toml`` would execute or import code or send a key, this is allowed only
if the user's own job file or the command line sets the same value, or with ``--trust``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from batchkit.commands import Say
from batchkit.config.doings import EXPORT, ON_END, OPTIONAL, Doing, doings, lines_of
from batchkit.config.export_target import target_of
from batchkit.config.loading import load_job
from batchkit.config.masking import masked
from batchkit.config.tables import JobConfig
from batchkit.errors import JobError
from batchkit.storage.runfolder import JOB, is_of_run
from batchkit.storage.starts import place_of_job, read_history


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
    """Return ``job`` if its side effects are allowed, after ``say`` has received a line for each of them.

    - ``of``: consider only side effects whose key starts with one of these prefixes.
    - ``trust``: allow all side effects.
    - ``fresh``: a new run begins, so no earlier host is known.
    - ``named``: for the job of a run folder, the user's job file; by default the one that the last start used. Keys of
      ``OPTIONAL`` that this file does not set are left out.
    - ``overrides``: the settings of the command line.

    Raises:
        JobError: The user's job file sets something else, or a key would be sent to another host than before.
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
    except JobError:  # the file is gone or no longer a job
        theirs = None
    said = [] if theirs is None else doings(theirs)
    # With secrets masked, too: this is how the run folder's job.toml has them.
    known = {*said, *(doing._replace(what=masked(doing.what)) for doing in said)}
    given = {override.partition("=")[0].strip() for override in overrides}
    foreign = [doing for doing in due if doing not in known and not given.issuperset(doing.keys)]
    where = f"only {folder / JOB} has" if theirs is None else f"{file} does not have"
    if refused := [doing.line for doing in foreign if doing.keys[0] not in OPTIONAL]:
        lines = "\n".join(f"  {line}" for line in refused)
        raise JobError(
            f"{where} the following settings, and batchkit does not trust a run folder with them:\n{lines}\nGive the"
            " job file that has these settings, or allow them with --trust"
        )
    for doing in foreign:
        (key,) = doing.keys
        say(
            f"{key} is ignored, because {where} this value (--trust {OPTIONAL[key]} it): {doing.line}"
        )
    return _with_optional(job, job if theirs is None else theirs, given, foreign)


def _with_optional(
    job: JobConfig, theirs: JobConfig, given: Collection[str], foreign: Sequence[Doing]
) -> JobConfig:
    """Return ``job`` with the user's values for the ``OPTIONAL`` keys, and without those in ``foreign``, which only the
    run folder sets. A value comes from the command line if its key is in ``given``, otherwise from ``theirs``, the
    user's job file."""
    left_out = {doing.keys[0] for doing in foreign}
    on_end = (job if ON_END in given else theirs).run.on_end
    exports = (job if EXPORT in given else theirs).output.export
    if EXPORT in left_out:
        exports = [text for text in exports if not target_of(text).is_remote]
    on_end = None if ON_END in left_out else on_end
    return job.with_keys(run={"on_end": on_end}, output={"export": exports})


def _check_hosts(folder: Path, due: Sequence[Doing]) -> None:
    sent = [doing for doing in due if doing.host is not None]
    recorded = read_history(folder).hosts if sent else {}
    for doing in sent:
        host = recorded.get(doing.keys[0].removesuffix(".base_url"), doing.host)
        if host != doing.host:
            raise JobError(
                f"{doing.line}, but the run used {host} so far; if the change is intended, add --trust"
            )
