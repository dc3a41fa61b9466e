"""The run folder at the beginning of a start: what happens to the files of an earlier start.

A run continues only with the job and the input that it began with, because its table must not mix two configurations.
If they differ, ``on_change`` decides: stop and list the differences, begin a new run and keep the old one, or keep the
records of unchanged rows and run the other rows.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from batchkit.config.doings import hosts_of
from batchkit.config.masking import masked
from batchkit.config.tables import JobConfig
from batchkit.errors import (
    BatchkitError,
    ChangedError,
    Interrupted,
    JobError,
    LostVectorError,
    StoreError,
)
from batchkit.execution.parity import can_be_checked, unchecked
from batchkit.execution.repair import repair_held
from batchkit.execution.requeue import finish_requeue, requeue
from batchkit.execution.reuse import reusable
from batchkit.execution.start import Start
from batchkit.rendering.templates.prompt import constant_files
from batchkit.runs.verify import Compared
from batchkit.sources import never
from batchkit.sources.formats import ROWS_ARE_FILES
from batchkit.sources.input import Input, input_changes
from batchkit.storage.checkpoint import CHECKPOINT, check_log
from batchkit.storage.files import open_log
from batchkit.storage.identity import CHANGING, continued, differences, scoring_of
from batchkit.storage.job_toml import write_job
from batchkit.storage.ledger import Ledger
from batchkit.storage.lines import Generation
from batchkit.storage.log import RESULTS, STEPS, LogLine, read_generations, read_lines
from batchkit.storage.manifest import FileFingerprint, Manifest, read_manifest, without_manifest
from batchkit.storage.runfolder import Claim, claim, is_of_run, is_run, move_aside
from batchkit.storage.score_store import SCORES
from batchkit.storage.starts import History, StartLog, StartNote, read_history
from batchkit.storage.store.lease import leased
from batchkit.storage.store.mirror import Mirror
from batchkit.storage.store.restore import fetch, relation
from batchkit.types import Record, Row, utc_now

# Changes of these keys alter a row's requests or have no effect on answers, so a recorded answer to an equal request
# stays valid. Keys that change the answer to an equal request (model, seed, ``parse``, ``reask``) are not here.
_OF_REQUESTS = re.compile(
    r"(input|rollout|select|vars)\.|prompt\.files:|output\.(keep|prompt|choices):"
    r"|steps\.\w+\.(prompt\.(?!chat_template_kwargs)|sampling\.|when:|engine:|place:)"
)


class OpenRun(NamedTuple):
    """A run folder that this process has locked and opened.

    - ``manifest``: the job and the input at the beginning of the run.
    - ``starts``: the notes of its starts.
    - ``messages``: lines for the log about opening the folder.
    - ``unchecked``: changed options, by key of the identity. The run may continue with them only after
      ``parity.check``, and ``accept`` notes them.
    - ``reused``: the folders in ``run.reuse`` whose answers hold for this run.
    - ``mirror``: the copy of the folder in ``output.store``, or None.
    """

    folder: Path
    ledger: Ledger
    manifest: Manifest
    starts: StartLog
    messages: list[str]
    unchecked: Mapping[str, Any]
    reused: Sequence[Path]
    mirror: Mirror | None

    def accept(self, job: JobConfig) -> None:
        """Note that the run continues with the ``unchecked`` options of ``job``."""
        self.starts.learn(checked={**self.starts.history.checked, **self.unchecked})
        self.starts.save()
        write_job(self.folder, job)


@contextmanager
def open_run(start: Start, source: Input) -> Iterator[OpenRun]:
    """Lock the run folder, handle changes of job and input, and open the ledger. Close everything at the end of the
    block.

    Raises:
        ChangedError: job or input changed, and ``on_change`` is "fail".
        StoreError: another process holds the folder, or the disk fails.
    """

    def say(text: str) -> None:
        if not start.options.quiet:
            print(f"batchkit: {text}", file=sys.stderr)

    job = start.options.begun_with or start.job  # the run folder keeps the job without overrides
    _import_what_writes(job)
    folder, messages = job.folder, list[str]()
    # The renderer holds template files as read.
    as_read = start.options.begun_with or start.renderer.job
    new = Manifest.new(as_read, source.files or [], constant_files(job))
    with ExitStack() as held, ExitStack() as of_store:
        lock = held.enter_context(claim(folder))
        lease = None
        if job.store is not None:
            lease = of_store.enter_context(leased(job.store, job.run.store_interval_s, say))
            if (state := relation(folder, lease.chain)) == "other":
                messages.append(f"another machine has continued this run in {job.store}")
                lock = _claim_again(held, job, messages)
            if state != "ahead":
                n_bytes = fetch(lease.chain, folder)
                messages.append(f"restored {n_bytes / 2**20:,.1f} MiB from {job.store}")
        if _must_move_aside(start, source, new, messages):
            lock = _claim_again(held, job, messages)
        if lease is not None:
            lock.lost_because = lambda: lease.lost
        starts = StartLog(folder, lock)
        if not is_run(folder):
            # The manifest comes last: a reader that finds it finds the job and the log, too.
            write_job(folder, job)
            open_log(folder / RESULTS).close()
            new.write(folder)
        manifest = _manifest_of(folder, new, starts)
        changed = unchecked(starts.history.added_to(manifest).identity, new.identity)
        starts.learn(**_facts_of(as_read, starts.history))
        starts.begin(StartNote.now(start.options.command, start.options.overrides))
        if not changed:
            write_job(folder, job)
        ledger = _open_ledger(folder, lock, messages)
        reused = [*reusable(start.job, messages.append)]
        starts.save()
        mirror = None if lease is None else Mirror(lease, folder, job.run.store_interval_s)
        run = OpenRun(folder, ledger, manifest, starts, messages, changed, reused, mirror)
        with _closing(run):
            yield run


def _claim_again(held: ExitStack, job: JobConfig, messages: list[str]) -> Claim:
    """Move the run folder aside, and lock a new one. ``held``: the lock on the old folder, which is released."""
    folder = job.folder
    aside = move_aside(folder)  # this moves the lock file, too
    held.close()
    if job.is_trial:
        shutil.rmtree(aside, ignore_errors=True)
    else:
        messages.append(f"the earlier run is kept in {aside}")
    lock = held.enter_context(claim(folder))
    if _has_run(folder):
        raise StoreError(
            f"{folder}: another process began a run here while this one moved the earlier run"
            " aside; wait until that run ends, then run the same command again"
        )
    return lock


def _manifest_of(folder: Path, new: Manifest, starts: StartLog) -> Manifest:
    """Return the manifest of the run in ``folder``. ``new`` describes the present job and input.

    A run with records keeps its manifest; differences that are allowed (a touched file, a model's commit) are noted in
    ``starts``. A run without records gets the new manifest.
    """
    manifest = read_manifest(folder)
    then = starts.history.added_to(manifest)
    if _has_records(folder):
        known, begun = continued(then.identity, new.identity).found, manifest.identity.found
        found = {key: names for key, names in known.items() if names != begun.get(key)}
        starts.learn(found=found, input=None if new.input == manifest.input else new.input)
        return manifest
    starts.learn(found={}, checked={}, input=None)
    # A job that was read from its job.toml has masked secrets; keep their fingerprints.
    renewed = manifest.renewed(new, new.identity.with_secrets_of(then.identity))
    if renewed != manifest:
        renewed.write(folder)
    return renewed


def _facts_of(job: JobConfig, then: History) -> dict[str, Any]:
    """Return facts about a run that may change from start to start. ``then``: the history before this start."""
    facts: dict[str, Any] = {"hosts": hosts_of(job), "total": None}
    if job.made_in and not is_of_run(Path(job.made_in)):
        facts["job_file"] = job.made_in
    if not then.starts:
        facts["scoring"] = scoring_of(job)
    elif then.scoring != scoring_of(job):
        facts["scoring"] = None  # mixed until all rows are scored again
    return facts


def _open_ledger(folder: Path, lock: Claim, messages: list[str]) -> Ledger:
    """Open the ledger. If vectors or generations of some records are missing, repair the logs first.

    Rows whose vector is missing become pending again. Records of rows that lost generations get ``generations_lost``.
    """
    try:
        ledger = Ledger(folder, lock)
        messages += ledger.messages
        if not ledger.lost:
            return ledger
        ledger.close()
    except LostVectorError as error:
        messages.append(str(error))
    messages.append(repair_held(folder, lock, lambda records: Compared()))
    return Ledger(folder, lock)


def _import_what_writes(job: JobConfig) -> None:
    """Import the packages that write the run's files. A broken package is thus found before the model is loaded.

    Raises:
        JobError: a package is missing or broken.
    """
    for name in ["numpy", *["pyarrow"] * job.may_have_vectors]:
        try:
            import_module(name)
        except Exception as error:  # a broken package may raise anything
            raise JobError(
                f"{name}, which writes files of the run, can't be imported: {' '.join(str(error).split())};"
                f" install it again: pip install --force-reinstall {name}"
            ) from error


@contextmanager
def _closing(run: OpenRun) -> Iterator[None]:
    """Close the ledger after the block, even after an error, and note how this start ended.

    The error that ended the run is raised again. If closing fails as well (the disk may be full), the second error
    becomes a note on the first.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, BatchkitError):
            run.starts.note(exit=error.exit_code)
        elif isinstance(error, Interrupted):
            run.starts.note(exit=128 + error.signum)
        try:
            _close(run)
        except StoreError as also:
            if not isinstance(error, StoreError):
                error.add_note(str(also))
        raise
    else:
        _close(run)


def _close(run: OpenRun) -> None:
    run.starts.note(ended_at=utc_now())
    with ExitStack() as last:
        if (mirror := run.mirror) is not None:
            last.callback(lambda: mirror.close(run.ledger.ends))
        last.callback(run.starts.save)
        run.ledger.close()


def _must_move_aside(start: Start, source: Input, new: Manifest, messages: list[str]) -> bool:
    """Handle the files of an earlier start in the folder. Return True if the folder must be moved aside.

    Raises:
        StoreError: there are records, but no manifest that describes their job and input.
        ChangedError: job or input changed, and ``on_change`` is "fail".
    """
    folder, options = start.job.folder, start.options
    if not is_run(folder):
        if _has_run(folder) and not options.fresh:
            raise StoreError(without_manifest(folder))
        return _has_run(folder)
    if finish_requeue(folder) is not None:
        messages.append("finished an interrupted --on-change requeue first")
    if options.fresh or start.job.is_trial or source.files is None:
        return True
    return _apply_on_change(start, source, new, messages)


def _has_run(folder: Path) -> bool:
    """Return whether the folder has more files than a start creates before it writes the manifest."""
    return is_run(folder) or _has_records(folder) or (folder / CHECKPOINT).exists()


def _has_records(folder: Path) -> bool:
    """Return whether one of the logs has content. Generations may be written long before the first record."""
    logs = [folder / RESULTS, folder / STEPS]
    return any(log.exists() and log.stat().st_size > 0 for log in logs)


def _is_dry(manifest: Manifest) -> bool:
    return bool(manifest.identity.get("engine.kind") == "dry-run")


def _nothing_to_mix(folder: Path, manifest: Manifest, new: Manifest) -> str:
    """Return why the old records can be discarded; "" if they must be kept."""
    if _is_dry(manifest) and not _is_dry(new):
        return "the earlier run was a dry run"
    if _are_some_ok(read_lines(folder / RESULTS)) or _are_some_ok(read_generations(folder)):
        return ""
    return "no row was answered before"


def _are_some_ok(lines: Iterable[LogLine[Record] | LogLine[Generation]]) -> bool:
    return any(line.record is not None and line.record.status == "ok" for line in lines)


def _apply_on_change(start: Start, source: Input, new: Manifest, messages: list[str]) -> bool:
    """Compare job and input with the run's manifest, and apply ``on_change`` to changes. Return True to move the run
    aside.

    If the last start ended because the job was wrong, the user may have corrected a file that a row names. Such a
    change is not visible here, so ``on_change`` then applies even if no change is found.
    """
    folder, options = start.job.folder, start.options
    history, on_change = read_history(folder), options.on_change
    manifest = history.added_to(read_manifest(folder))
    job_changes = differences(manifest.identity, new.identity)
    changes = job_changes + input_changes(manifest.input, new.input)
    if on_change == "requeue-input":
        on_change = "fail" if job_changes else "requeue"
    last_exit = None if history.last_start is None else history.last_start.exit
    was_wrong = options.attempts is None and last_exit == JobError.exit_code
    if not (changes or was_wrong) or not _has_records(folder):
        return False
    if why := _nothing_to_mix(folder, manifest, new):
        messages.append(f"{why}, so the run starts from the beginning")
        return True
    is_answered = _are_some_ok(read_lines(folder / RESULTS))
    if is_answered and not changes:
        return False
    if on_change == "requeue" and _is_dry(new) and not _is_dry(manifest):
        raise JobError(
            f"{folder}: has answers of a model, which a dry run would replace; give the dry run another"
            " name (--set name=…)"
        )
    is_checkable = is_answered and changes == job_changes and can_be_checked(start, changes)
    if on_change == "fail" and is_checkable:
        return False  # ``parity.check`` decides, once the engine is loaded
    if on_change == "fail" and (is_answered or not was_wrong):
        listed = "\n".join(f"  {change}" for change in changes)
        raise ChangedError(
            f"{folder}: job or input changed since this run began\n{listed}\n"
            "Undo the change, or choose: --fresh or --on-change new (begin a new run and keep the old"
            " one), --on-change requeue (run the affected rows again), or another name"
            " (--set name=…)"
        )
    if changes:
        messages.append(f"changed since this run began: {'; '.join(changes)}")
    if on_change == "new":
        return True
    messages.append(_requeued(folder, source, new, job_changes, is_answered=is_answered))
    return False


def _requeued(
    folder: Path, source: Input, new: Manifest, job_changes: Sequence[str], *, is_answered: bool
) -> str:
    """Requeue the run in ``folder`` with the ``new`` job and input. Return a line for the log.

    ``is_answered``: some rows have an answer.
    """
    history = read_history(folder)
    manifest = history.added_to(read_manifest(folder))
    # Another filter or shard changes no answer: records of rows that are still in the input stay valid.
    holds = all(
        change.startswith(("input.where:", "input.shard:", "input.empty:", "input.cross:"))
        for change in job_changes
    )
    reuses = (folder / STEPS).exists() and all(map(_OF_REQUESTS.match, job_changes))
    rows = source.everything(never) if holds or reuses else iter(())
    rows = _of_trusted_files(rows, manifest.input)
    check_log(folder)
    # Without kept records, facts of the models that answered them don't bind the run.
    then, now = manifest.identity, new.identity
    renewed = manifest.renewed(new, continued(then, now) if holds else now.with_secrets_of(then))
    # The rows that were skipped may have changed, too.
    forgotten: dict[str, Any] = {"found": {}, "checked": {}, "input": None, "skipped_elsewhere": 0}
    if (folder / SCORES).exists():  # stored scores use the old indexes: score all rows again
        forgotten["scoring"] = None
    history = history.model_copy(update=forgotten)
    keeps = holds and is_answered
    return requeue(folder, rows, renewed, history, by_id=source.has_ids, keep_records=keeps)


def _of_trusted_files(rows: Iterator[Row], then: Sequence[FileFingerprint]) -> Iterator[Row]:
    """Yield ``rows``, except rows of a file (for example a PDF) that changed while an earlier start read it.

    The record of such a row has the hash of the old file, but the model may have seen the new file.
    """
    changing = [file.read_as.partition(": ") for file in then if file.sha256 == CHANGING]
    names = {name for kind, _, name in changing if kind in ROWS_ARE_FILES}
    return (row for row in rows if names.isdisjoint(_names_of(row))) if names else rows


def _names_of(row: Row) -> set[str]:
    """Return the name of the row's file in two forms: unchanged, and as a fingerprint stores it (URL signatures
    masked)."""
    path = str(row.fields.get("path"))
    return {path, masked(path)}
