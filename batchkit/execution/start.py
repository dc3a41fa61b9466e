"""One start of a run: opens its folder and its source, and lets the loop settle the rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

from batchkit.config.tables import JobConfig
from batchkit.engines.registry import open_preflight
from batchkit.errors import BatchkitError, JobError
from batchkit.execution.exporter import exporting
from batchkit.execution.kept_engine import KeptEngine
from batchkit.execution.loop import Loop
from batchkit.execution.progress import Progress
from batchkit.execution.recorder import Recorder
from batchkit.execution.resume import OnChange, open_run
from batchkit.execution.rollouts.function import Function
from batchkit.execution.signals import StopRequest
from batchkit.execution.summary import Outcome
from batchkit.rendering.constant_files import constant_files
from batchkit.rendering.renderer import AdjustSampling
from batchkit.rendering.steps import renderer_of
from batchkit.sources import is_fallback, never
from batchkit.sources.input import Input, from_job
from batchkit.sources.rowhash import known_hashes
from batchkit.sources.sample import check_countable, sampled
from batchkit.storage.checkpoint import check_log
from batchkit.storage.identity import engine_identity
from batchkit.storage.job_toml import check_secrets
from batchkit.storage.ledger import RESULTS, failure_kind, record_of
from batchkit.storage.manifest import read_manifest
from batchkit.storage.newest import NewestLog, read_newest
from batchkit.storage.runfolder import is_run
from batchkit.storage.score_store import check_one_row_each, references_of
from batchkit.types import Row


def start_run(
    job: JobConfig,
    source: Input | None = None,
    *,
    attempts: Mapping[int, int] | None = None,
    quarantined: Collection[int] = (),
    fresh: bool = False,
    on_change: OnChange = "fail",
    skip_from: Path | None = None,
    begun_with: JobConfig | None = None,
    overrides: Sequence[str] = (),
    adjust_sampling: AdjustSampling | None = None,
    rollout: Function | None = None,
    kept: KeptEngine | None = None,
    stop: StopRequest | None = None,
    quiet: bool = False,
    command: str = "python",
) -> Outcome:
    """Settle the rows of ``source``, by default the job's own input, that have no record yet.

    ``attempts``: run only these rows again, except those that have an answer by now; it maps a
    row's index to the number of its last attempt, 0 if it has no record. Those ``quarantined``
    killed the engine, and are run alone. ``begun_with``: the job that the run folder was made for,
    if ``overrides`` make ``job`` differ from it on purpose. ``rollout`` is used in place of the function
    that the job names. ``stop``: the caller handles signals.

    Raises:
        BatchkitError: the run could not begin. What stops it later is in the outcome.
    """
    check_secrets(job)
    source = from_job(job) if source is None else source
    size = job.run.sample
    if size is not None:
        check_countable(source)
    renderer = renderer_of(job, adjust_sampling=adjust_sampling)
    references = references_of(job) if job.scoring.is_on else None
    if references and source.files is not None:
        check_one_row_each(references, _shared_ids(job, source))
    if fresh or on_change == "new":
        for name in job.engine_names:  # before the folder is moved: an option may be mistyped
            open_preflight(job.with_engine(name))
    engine = engine_identity(job)  # before the manifest's: a change between them shows
    prompt_files = constant_files(job)
    outcome: Outcome | None = None
    try:
        with ExitStack() as stack:
            if stop is None:
                stop = stack.enter_context(StopRequest().installed())
            show = stack.enter_context(exporting(job))
            run = stack.enter_context(
                open_run(
                    begun_with or job,
                    source,
                    command=command,
                    overrides=overrides,
                    fresh=fresh,
                    on_change=on_change,
                )
            )
            rows = source
            if size is not None:
                rows = sampled(source, job.input, size, seed=job.run.seed, settled=run.store.totals)
            renderer.check_files()  # the manifest must describe the same templates
            progress = Progress(
                job.folder,
                interval_s=job.run.checkpoint_interval_s,
                quiet=quiet,
                generates=job.task == "generate",
            )
            stack.enter_context(closing(progress))
            recorder = Recorder(run, stop.began, progress.event, show)
            stack.enter_context(closing(recorder))
            for text in filter(None, [source.left_out, *run.messages, _sample_of(rows, job)]):
                progress.event(text)
            loop = Loop(
                job,
                run,
                renderer,
                progress,
                recorder,
                stop,
                rows,
                references,
                engine,
                prompt_files,
                kept,
                rollout,
            )
            if attempts is not None:
                outcome = loop.retry(_still_due(run.folder / RESULTS, attempts), quarantined)
            elif skip_from is None:
                outcome = loop.run(lambda row: False)
            else:
                outcome = loop.run(_done_in(skip_from, job, source))
            if size is not None:  # the table of its answers has all rows
                summary = replace(outcome.summary, source=source)
                outcome = outcome._replace(summary=summary)
            outcome.checked()  # what closes the run must know of the error
    except BatchkitError as error:
        if outcome is None or error is not outcome.error:
            raise
    return outcome


def _sample_of(source: Input, job: JobConfig) -> str:
    if source.sample_of is None or job.run.sample is None:
        return ""
    n_rows, size = source.sample_of, min(job.run.sample or 0, source.sample_of)
    return (
        f"run.sample: {size:,} of {n_rows:,} rows, drawn at random with run.seed = {job.run.seed}; a start"
        " without it runs the rest"
    )


def _still_due(log: Path, attempts: Mapping[int, int]) -> dict[int, int]:
    """``attempts`` without the rows that another process retried before this one had the lock.

    After a requeue by another process, an index may belong to a row that has an answer.
    """
    due = dict(attempts)
    with closing(NewestLog(log)) as newest:
        for index, start, end in newest:
            if index in due:
                record = record_of(newest.view[start:end]) or {"status": "failed"}
                is_other = (record.get("attempt") or 1) != attempts[index]
                if is_other or failure_kind(record) is None:
                    del due[index]
    return due


def _done_in(folder: Path, job: JobConfig, source: Input) -> Callable[[Row], bool]:
    """Whether a row has an answer in the run in ``folder``; each answer there counts for one row.

    Without ids of one field, ``input.id``, rows are named by their index or by another field, and the
    name may be another row's: they must have the same fields, too. So must rows that share their id,
    there or in the input, which is read for that once an id's fields differ; and rows that can be
    read only once.
    """
    if not is_run(folder):
        raise JobError(f"--skip-from {folder}: not a run folder")
    check_log(folder)
    log, times, id_field = folder / RESULTS, Counter[str](), job.input.id
    if id_field is not None and read_manifest(folder).identity.get("input.id") == id_field:
        times.update(record["id"] for record in read_newest(log))

    def name(row_id: str, row_hash: str | None) -> str:
        return row_id if times[row_id] == 1 else f"{row_hash} {row_id}"

    left, hash_of = Counter[str](), dict[str, str | None]()
    for record in read_newest(log):
        if failure_kind(record) is None and not is_fallback(record["id"]):
            left[name(record["id"], record.get("input_hash"))] += 1
            hash_of[record["id"]] = record.get("input_hash")
    shared: set[str] | None = None

    def is_shared(row_id: str) -> bool:
        nonlocal shared
        if shared is None:
            shared = _shared_ids(job, source)
        return row_id in shared

    def is_done(row: Row) -> bool:
        hashes = known_hashes(row.fields, nan_is_null=False)
        if times[row.id] == 1 and left[row.id]:
            differs = hash_of[row.id] not in (None, *hashes)
            is_other = differs and (source.files is None or is_shared(row.id))
            found = None if is_other else row.id
        else:
            found = next((each for one in hashes if left[each := name(row.id, one)]), None)
        if found is None:
            return False
        left[found] -= 1
        return True

    return is_done


def _shared_ids(job: JobConfig, source: Input) -> set[str]:
    """The ids that several rows have, also rows that ``input.where`` leaves out: the other run may have
    had those."""
    if job.input.where:  # not with rows from Python
        table = job.input.model_copy(update={"where": {}})
        source = from_job(job.model_copy(update={"input": table}))
    ids = Counter(row.id for row in source.everything(never))
    return {each for each, n_rows in ids.items() if n_rows > 1}
