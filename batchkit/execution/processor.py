"""The door from Python: ``ProductionBatchProcessor`` opens a run and starts the loop on it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from batchkit.config.loading import load_job, resolve_paths
from batchkit.config.tables import JobConfig
from batchkit.engines.registry import open_preflight
from batchkit.errors import BatchkitError, JobError
from batchkit.execution.loop import Loop, Outcome
from batchkit.execution.progress import Progress
from batchkit.execution.resume import OnChange, open_run
from batchkit.execution.signals import StopRequest
from batchkit.execution.summary import RunSummary
from batchkit.rendering.constant_files import constant_files
from batchkit.rendering.renderer import AdjustSampling, PromptRenderer
from batchkit.sources import is_fallback
from batchkit.sources.input import Input, from_job, from_python
from batchkit.sources.rowhash import known_hashes
from batchkit.storage.checkpoint import check_log
from batchkit.storage.identity import engine_identity
from batchkit.storage.job_toml import check_secrets
from batchkit.storage.ledger import RESULTS, failure_kind, record_of
from batchkit.storage.manifest import read_manifest
from batchkit.storage.newest import NewestLog, read_newest
from batchkit.storage.runfolder import is_run
from batchkit.storage.score_store import references_of
from batchkit.types import Row


class ProductionBatchProcessor:
    """Runs every row through a model and writes each finished row to disk, exactly once.

    ``job`` is a JobConfig or the path of a job file. Calling ``process`` again continues where the
    last call stopped; one processor makes one run at a time. ``begun_with`` is the job that the run
    folder was made for, if ``overrides`` make ``job`` differ from it on purpose. ``adjust_sampling``
    changes the sampling of each row, its own included; workers on Ray don't have it. A resume can't
    compare functions: give a job with another one another name.
    """

    def __init__(
        self,
        job: JobConfig | str | Path,
        *,
        fresh: bool = False,
        on_change: OnChange = "fail",
        skip_from: Path | None = None,
        stop: StopRequest | None = None,
        quiet: bool = False,
        command: str = "python",
        begun_with: JobConfig | None = None,
        overrides: Sequence[str] = (),
        adjust_sampling: AdjustSampling | None = None,
    ) -> None:
        self.job = (
            resolve_paths(job, Path.cwd()) if isinstance(job, JobConfig) else load_job(Path(job))
        )
        check_secrets(self.job)
        self._begun_with = begun_with or self.job
        self._fresh = fresh
        self._on_change: OnChange = on_change
        self._skip_from = skip_from
        self._handles_signals = stop is not None
        self._stop = stop or StopRequest()
        self._quiet = quiet
        self._command = command
        self._overrides = overrides
        self._adjust_sampling = adjust_sampling

    def process(self, rows: Iterable[Any] | None = None) -> RunSummary:
        """Run the job's input, or ``rows``: prompts, chat messages, dicts of template fields, or a
        DataFrame (pandas, polars; pyarrow's tables too), whose NaN is None.

        A list of rows, or a DataFrame, resumes like a file. An iterator can't be compared with what
        an earlier call saw, so each call begins a new run; the old folder is moved aside.

        Raises:
            BatchkitError: the run stopped; everything finished is on disk. See ``errors``.
        """
        return self.start(rows).checked()

    def start(self, rows: Iterable[Any] | None = None) -> Outcome:
        """As ``process``, but an error that stops the run after it has begun is returned, with the
        summary of what is done."""
        return self._run(self._source(rows), attempts=None)

    def retry(
        self,
        attempts: Mapping[int, int],
        *,
        quarantined: Collection[int] = (),
        rows: Sequence[Any] | Input | None = None,
    ) -> RunSummary:
        """Run the rows in ``attempts`` again, except those that have an answer by now.

        ``attempts`` maps a row's index to the number of its last attempt, 0 if it has no record
        yet; the ``quarantined`` ones killed the engine, and are run alone. ``rows`` (or their
        source) and errors as with ``process``.
        """
        source = rows if isinstance(rows, Input) else self._source(rows)
        return self._run(source, attempts, quarantined).checked()

    def _source(self, rows: Iterable[Any] | None) -> Input:
        return from_job(self.job) if rows is None else from_python(rows, self.job.input)

    def _run(
        self,
        source: Input,
        attempts: Mapping[int, int] | None,
        quarantined: Collection[int] = (),
    ) -> Outcome:
        renderer = PromptRenderer(self.job, adjust_sampling=self._adjust_sampling)
        references = references_of(self.job) if self.job.scoring.is_on else None
        if self._fresh or self._on_change == "new":
            open_preflight(self.job)  # before the folder is moved: an option may be mistyped
        engine = engine_identity(self.job)  # before the manifest's: a change between them shows
        prompt_files = constant_files(self.job)
        outcome: Outcome | None = None
        try:
            with ExitStack() as stack:
                if not self._handles_signals:
                    stack.enter_context(self._stop.installed())
                run = stack.enter_context(
                    open_run(
                        self._begun_with,
                        source,
                        command=self._command,
                        overrides=self._overrides,
                        fresh=self._fresh,
                        on_change=self._on_change,
                    )
                )
                renderer.check_files()  # the manifest must describe the same templates
                progress = Progress(
                    self.job.folder,
                    self.job.name,
                    interval_s=self.job.run.checkpoint_interval_s,
                    quiet=self._quiet,
                )
                stack.enter_context(closing(progress))
                for text in run.messages:
                    progress.event(text)
                loop = Loop(
                    self.job,
                    run,
                    renderer,
                    progress,
                    self._stop,
                    source,
                    references,
                    engine,
                    prompt_files,
                )
                if attempts is not None:
                    due = _still_due(run.folder / RESULTS, attempts)
                    outcome = loop.retry(due, quarantined)
                elif self._skip_from is None:
                    outcome = loop.run(lambda row: False)
                else:
                    outcome = loop.run(_done_in(self._skip_from, self.job.input.id))
                outcome.checked()  # what closes the run must know of the error
        except BatchkitError as error:
            if outcome is None or error is not outcome.error:
                raise
        return outcome


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


def _done_in(folder: Path, id_field: str | None) -> Callable[[Row], bool]:
    """Whether a row has an answer in the run in ``folder``.

    Without ids of one field, ``id_field``, rows are named by their index or by another field, and
    the name may be another row's: they must have the same fields, too.
    """
    if not is_run(folder):
        raise JobError(f"--skip-from {folder}: not a run folder")
    check_log(folder)
    by_id = id_field is not None and read_manifest(folder).identity.get("input.id") == id_field

    def name(row_id: str, row_hash: str | None) -> str:
        return row_id if by_id else f"{row_hash} {row_id}"

    def names(row: Row) -> Iterator[str]:
        known = (None,) if by_id else known_hashes(row.fields, nan_is_null=False)
        return (name(row.id, row_hash) for row_hash in known)

    done = {
        name(r["id"], r.get("input_hash"))
        for r in read_newest(folder / RESULTS)
        if failure_kind(r) is None and not is_fallback(r["id"])
    }
    return lambda row: any(each in done for each in names(row))
