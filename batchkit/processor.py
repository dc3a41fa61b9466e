"""The loop at batchkit's heart: fill the window, poll the engine, settle what came back."""

from __future__ import annotations

import time
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from batchkit.attempts import Attempts
from batchkit.config import JobConfig
from batchkit.engines import open_engine, open_preflight
from batchkit.engines.base import Engine
from batchkit.engines.launcher import LOG, Launcher
from batchkit.errors import (
    BatchkitError,
    BrokenInputError,
    InputError,
    JobError,
    TooManyFailuresError,
)
from batchkit.hints import hints
from batchkit.inputs import Input, Total, from_job, from_python
from batchkit.job_file import load_job, resolve_paths
from batchkit.ladder import Ladder
from batchkit.ledger import RESULTS, failure_kind, read_newest
from batchkit.manifest import write_manifest
from batchkit.ordering import well_ordered
from batchkit.prefetch import Prefetch
from batchkit.progress import Progress, State
from batchkit.prompts import PromptRenderer
from batchkit.records import to_record, without_blank
from batchkit.resume import OnChange, OpenRun, open_run
from batchkit.rowhash import input_hash
from batchkit.runfolder import is_run
from batchkit.scorebook import references_of
from batchkit.scoring import Scored, Scoring, kept_fields
from batchkit.stopping import DRAIN_S, Interrupted, StopRequest
from batchkit.store import Store
from batchkit.summary import RunSummary
from batchkit.supervisor import Lessons, SupervisedEngine
from batchkit.types import Completion, Request, Row, Usage
from batchkit.window import Window

POLL_S = 0.05
AHEAD = 256
READ_AT_ONCE = 16
MOST_EVENTS = 20
_SHARE_FROM = 20  # a share of failed rows says nothing before this many are settled


class ProductionBatchProcessor:
    """Puts rows through a model and every finished row on disk, exactly once.

    ``job`` is a JobConfig or the path of a job file. Calling ``process`` again carries on where the
    last call stopped; one processor makes one run at a time. ``begun_with`` is the job that the run
    folder stands for, where ``job`` departs from it on purpose by ``overrides``.
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
    ) -> None:
        self.job = (
            resolve_paths(job, Path.cwd()) if isinstance(job, JobConfig) else load_job(Path(job))
        )
        self._begun_with = begun_with or self.job
        self._fresh = fresh
        self._on_change: OnChange = on_change
        self._skip_from = skip_from
        self._handles_signals = stop is not None
        self._stop = stop or StopRequest()
        self._quiet = quiet
        self._command = command
        self._overrides = overrides

    def process(self, rows: Iterable[Any] | None = None) -> RunSummary:
        """Run the job's input, or ``rows``: prompts, chat messages, or dicts of template fields.

        A list of rows resumes like a file does. An iterator can't be compared with what an earlier
        call saw, so each call begins a new run; the old folder is moved aside.

        Raises:
            BatchkitError: the run stopped; everything finished is on disk. See ``errors``.
        """
        source = from_job(self.job) if rows is None else from_python(rows, self.job.input)
        return self._run(source, attempts=None)

    def retry(
        self,
        attempts: Mapping[int, int],
        *,
        convicted: Collection[int] = (),
        rows: Sequence[Any] | Input | None = None,
    ) -> RunSummary:
        """Run the rows in ``attempts`` again, whatever their record says.

        ``attempts`` maps a row's index to the number of its last attempt, 0 where it has no record
        yet; the ``convicted`` ones killed the engine, and are run alone. ``rows`` (or where they
        come from) and errors as with ``process``.
        """
        if rows is None:
            source = from_job(self.job)
        else:
            source = rows if isinstance(rows, Input) else from_python(rows, self.job.input)
        return self._run(source, attempts, convicted)

    def _run(
        self,
        source: Input,
        attempts: Mapping[int, int] | None,
        convicted: Collection[int] = (),
    ) -> RunSummary:
        renderer = PromptRenderer(self.job)
        references = references_of(self.job) if self.job.scoring.is_on else None
        if self._fresh or self._on_change == "new":
            open_preflight(self.job)  # a mistyped option must not cost the folder its place
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
            progress = stack.enter_context(closing(self._progress()))
            for text in run.news:
                progress.event(text)
            loop = _Loop(self.job, run, renderer, progress, self._stop, source, references)
            if attempts is not None:
                return loop.retry(attempts, convicted)
            done_elsewhere = set() if self._skip_from is None else _ok_ids(self._skip_from)
            return loop.run(done_elsewhere)

    def _progress(self) -> Progress:
        return Progress(
            self.job.folder,
            self.job.name,
            interval_s=self.job.run.checkpoint_interval_s,
            quiet=self._quiet,
        )


class _Loop:
    """One start of a run. Its own thread is the only one that touches engine and store."""

    def __init__(
        self,
        job: JobConfig,
        run: OpenRun,
        renderer: PromptRenderer,
        progress: Progress,
        stop: StopRequest,
        source: Input,
        references: Mapping[str, str | None] | None,
    ) -> None:
        self._job = job
        self._store, self._manifest, self._folder = run.store, run.manifest, run.folder
        self._renderer = renderer
        self._progress = progress
        self._stop = stop
        self._source = source
        self._attempts: Mapping[int, int] = {}
        self._convicted: Collection[int] = ()
        self._total = Total(source)
        self._resumed = run.store.totals.ok + run.store.totals.failed
        self._elsewhere = 0
        self._tokens_before = _tokens(run.store)
        self._scoring = (
            Scoring(job.scoring, references, progress.event) if job.scoring.is_on else None
        )
        self._kept = kept_fields(job)
        self._again = Attempts(job.retry, renderer, self._finds_nothing)
        self._in_flight = 0
        self._stopping = False
        self._settled = self._failed = 0
        self._next_sync = 0.0
        self._load_s = 0.0
        self._seconds = 0.0

    def run(self, done_elsewhere: Container[str]) -> RunSummary:
        """Settle every row that has no record and whose id is not in ``done_elsewhere``."""
        rows = self._source.read(self._store.totals.is_settled)
        return self._settle_all(self._without(done_elsewhere, self._readable(rows)))

    def retry(self, attempts: Mapping[int, int], convicted: Collection[int]) -> RunSummary:
        """Settle the rows in ``attempts`` anew; the numbers are those of their last attempts."""
        self._attempts, self._convicted = attempts, convicted
        self._resumed -= sum(map(self._store.totals.is_settled, attempts))
        rows = self._source.everything(lambda index: index not in attempts)
        return self._settle_all(self._readable(rows))

    def _readable(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Where reading breaks off, a run that has begun can be carried on once that is mended."""
        begun = self._resumed > 0
        try:
            for row in rows:
                begun = True
                yield row
        except InputError as error:
            if not begun:
                raise
            raise BrokenInputError(str(error)) from error

    def _without(self, done_elsewhere: Container[str], rows: Iterator[Row]) -> Iterator[Row]:
        for row in rows:
            if row.error is None and row.id in done_elsewhere:
                self._elsewhere += 1
            else:
                yield row

    def _settle_all(self, rows: Iterator[Row]) -> RunSummary:
        first = next(rows, None)
        if first is None:
            self._progress.event("nothing left to run: every row has a record")
            return self._summary(self._total.wait())
        self._look_at(first)
        if self._resumed:
            of = "" if (total := self._total.wait(timeout_s=1)) is None else f" of {total:,}"
            self._progress.event(f"resumed {self._resumed:,}{of} rows")
        with closing(self._prefetch(chain([first], rows))) as prefetch:
            try:
                self._generate(prefetch)
            except BatchkitError as error:
                error.summary = self._summary(self._total.now(), error.exit_code)
                raise
            if self._stop.signum is not None:
                return self._summary(self._total.now(), 128 + self._stop.signum)
            return self._summary(self._total.wait())

    def _look_at(self, first: Row) -> None:
        if first.error is None:
            for hint in hints(self._job, first.fields):
                self._progress.event(hint)

    def _generate(self, prefetch: Prefetch) -> None:
        started = time.monotonic()
        model = self._job.engine.model or self._job.engine.kind
        self._progress.event(f"loading model {model}, rendering the first rows meanwhile")
        with (
            closing(Launcher(self._folder / LOG)) as launcher,
            closing(self._engine(launcher)) as engine,
        ):
            loaded = time.monotonic()
            self._load_s = loaded - started
            self._manifest["starts"][-1]["engine"] = dict(engine.versions)
            self._progress.event(
                f"generating; model loaded in {self._load_s:.0f} s,"
                f" up to {engine.max_num_seqs} requests run at once"
            )
            try:
                with self._stop.deferred():
                    self._feed(engine, prefetch)
            finally:
                self._seconds = time.monotonic() - loaded

    def _engine(self, launcher: Launcher) -> SupervisedEngine:
        """The engine, with the settings that an earlier start found to be safe."""
        ladder = Ladder(self._known_steps())
        if ladder.steps:
            self._progress.event(f"engine settings remembered: {dict(ladder.overrides)}")
        return SupervisedEngine(
            self._job,
            self._tell,
            note=self._progress.note,
            remember=self._remember,
            ladder=ladder,
            convicted=self._convicted,
            among_accidents=self._manifest.get("engine_accidents", False),
            open_engine=partial(self._open, launcher),
        )

    def _open(self, launcher: Launcher, job: JobConfig) -> Engine:
        """May take minutes, and nothing is in flight meanwhile: a signal ends it at once."""
        with self._stop.immediate():
            return open_engine(job, launcher)

    def _known_steps(self) -> list[dict[str, Any]]:
        """What an earlier start found to be safe, if it had the same engine options."""
        steps, options = self._manifest["engine_steps"], input_hash(self._job.engine.options)
        if steps and self._manifest.get("engine_steps_for", options) != options:
            self._progress.event("engine options have changed: smaller settings are forgotten")
            steps = []
        self._manifest["engine_steps_for"] = options
        self._manifest["engine_steps"] = steps
        return list(steps)

    def _feed(self, engine: SupervisedEngine, prefetch: Prefetch) -> None:
        """Until every row is settled or a stop is due: fill, poll, settle."""
        window = Window(engine.max_num_seqs, fixed=_fixed(self._job))
        try:
            while True:
                self._fill(engine, prefetch, window.size)
                self._commit()
                if self._stop.signum is not None and self._must_stop():
                    break
                if not self._in_flight and not self._again and prefetch.exhausted:
                    break
                try:
                    self._poll(engine, prefetch)
                except Interrupted:  # while the engine was restarted: nothing is in flight to drain
                    break
                self._commit()
                change = window.fit(engine.max_num_seqs)
                change = change or window.adapt(engine.load(), self._in_flight)
                if change is not None:
                    self._progress.event(f"window {change.old} → {change.new}: {change.reason}")
                self._housekeeping()
        finally:
            self._store.flush()
            self._progress.update(self._state(), force=True)

    def _tell(self, text: str) -> None:
        """An event of the engine's life: also in the manifest, for ``status``; the last ones only."""
        self._progress.event(text)
        events = self._manifest["starts"][-1].setdefault("engine_events", [])
        events.append(text)
        del events[:-MOST_EVENTS]

    def _remember(self, lessons: Lessons) -> None:
        """What an engine's death taught reaches the manifest at once: the next start needs it."""
        self._manifest["starts"][-1]["engine_restarts"] = lessons.restarts
        self._manifest["engine_steps"] = lessons.steps
        self._manifest["engine_accidents"] = lessons.among_accidents
        write_manifest(self._folder, self._manifest)

    def _fill(self, engine: Engine, prefetch: Prefetch, size: int) -> None:
        """Submit what is rendered while there is room; wait only if the engine has nothing to do.

        Bounded, so that a stretch of rows that can't be rendered reaches the disk on the way.
        """
        for _ in range(AHEAD):
            if self._in_flight >= size or self._stop.signum is not None:
                return
            rendered = self._again.pop_due() or self._next_row(prefetch)
            if rendered is None:
                return
            if isinstance(rendered, Completion):
                self._settle(rendered, prefetch)
            else:
                engine.submit(rendered)
                self._in_flight += 1

    def _next_row(self, prefetch: Prefetch) -> Request | Completion | None:
        if self._in_flight and prefetch.broken:
            return None  # what is in flight is paid for: settle it before the error is raised
        return prefetch.get(timeout_s=0 if self._in_flight else POLL_S)

    def _poll(self, engine: Engine, prefetch: Prefetch) -> None:
        if not self._in_flight:
            if self._again:
                time.sleep(POLL_S)  # all that is left waits for its next try
            return
        for completion in engine.poll(POLL_S):
            self._in_flight -= 1
            self._settle(completion, prefetch)

    def _must_stop(self) -> bool:
        """A stop was asked for: say so once, and wait for what is in flight while that is wanted."""
        if not self._stopping and self._in_flight and not self._stop.is_due:
            self._stopping = True
            self._progress.event(
                f"stopping: up to {DRAIN_S:.0f} s for {self._in_flight} rows in flight;"
                " interrupt again to stop now"
            )
        return self._stop.is_due or not self._in_flight

    def _settle(self, completion: Completion, prefetch: Prefetch) -> None:
        """Write the row's record, unless it is tried again."""
        settled = self._again.settle(without_blank(completion))
        if settled is None:
            return
        prefetch.release(settled.request)
        self._store.append(
            to_record(
                settled,
                self._kept,
                with_prompt=self._job.output.prompt,
                scored=self._scored(settled),
            )
        )
        self._settled += 1
        self._failed += settled.error is not None

    def _scored(self, completion: Completion) -> Scored | None:
        if self._scoring is None:
            return None
        if completion.error is not None:
            return Scored(None, {})
        row = completion.request.row
        return self._scoring.score(completion.choices[0].text, row.fields, row.id)

    def _finds_nothing(self, completion: Completion) -> bool:
        if self._scoring is None:
            return False
        row = completion.request.row
        return self._scoring.finds_nothing(completion.choices[0].text, row.fields, row.id)

    def _commit(self) -> None:
        """What was settled reaches the log; then see whether too much of it failed."""
        self._store.flush()
        if self._failed and self._too_many_failed(self._job.run.fail_on_error):
            raise TooManyFailuresError(
                f"{self._failed} of {self._settled} rows failed; run.fail_on_error ="
                f" {str(self._job.run.fail_on_error).lower()} stops the run. What is finished is on"
                f" disk: see `batchkit status {self._folder}`"
            )

    def _too_many_failed(self, limit: bool | float) -> bool:
        if isinstance(limit, bool):
            return limit
        if isinstance(limit, int):
            return self._failed > limit
        # A row that can't be rendered fails at once, while good ones are still in flight.
        begun = self._settled + self._in_flight
        return begun >= _SHARE_FROM and self._failed > limit * begun

    def _housekeeping(self) -> None:
        """Progress at every turn, a checkpoint when its interval is over.

        A checkpoint that takes long is made less often, so that it costs at most a fiftieth of
        the time: it is a cache, and a late one only means that a resume reads more of the log.
        """
        self._progress.update(self._state())
        if self._manifest["total"] is None and (total := self._total.now()) is not None:
            self._manifest["total"] = total  # so that status need not count again
            write_manifest(self._folder, self._manifest)
        now = time.monotonic()
        if now >= self._next_sync:
            took = self._store.sync()
            interval = max(self._job.run.checkpoint_interval_s, 50 * took)
            self._next_sync = now + took + interval

    def _prefetch(self, rows: Iterator[Row]) -> Prefetch:
        look_ahead, may_wait = self._job.run.look_ahead, self._source.files is None
        if look_ahead > 1 and not may_wait:  # an iterator's rows may come one by one
            rows = well_ordered(rows, self._renderer.outlook, look_ahead)
        return Prefetch(
            rows,
            lambda row: self._renderer.render_or_fail(row, self._attempts.get(row.index, 0) + 1),
            threads=self._job.run.render_threads,
            ahead=AHEAD,
            max_bytes=self._job.media.max_memory_bytes,
            at_once=1 if may_wait else READ_AT_ONCE,
        )

    def _state(self) -> State:
        totals, before = self._store.totals, self._tokens_before
        now = _tokens(self._store)
        return State(
            total=None if (total := self._total.now()) is None else total - self._elsewhere,
            ok=totals.ok,
            failed=totals.failed,
            resumed=self._resumed,
            in_flight=self._in_flight,
            prompt_tokens=now.prompt_tokens - before.prompt_tokens,
            completion_tokens=now.completion_tokens - before.completion_tokens,
        )

    def _summary(self, total: int | None, code: int | None = None) -> RunSummary:
        """How it ended; without a ``code``, by whether a row failed."""
        if code is None or code > 128:
            self._store.sync()  # after an error, the store's own close does what can still be done
        state = self._state()
        if code is None:
            code = 3 if state.failed else 0
        self._manifest["total"] = total
        self._manifest["skipped_elsewhere"] = self._elsewhere
        self._manifest["starts"][-1]["exit"] = code
        self._manifest["starts"][-1]["seconds"] = round(self._seconds, 3)
        per_s = 1 / self._seconds if self._seconds else 0.0
        return RunSummary(
            name=self._job.name,
            folder=str(self._folder),
            total=max(state.settled + self._elsewhere, total or 0),
            ok=state.ok,
            failed=state.failed,
            skipped=self._resumed + self._elsewhere,
            retried=self._again.retried,
            seconds=round(self._seconds, 3),
            load_seconds=round(self._load_s, 3),
            prompt_tokens=state.prompt_tokens,
            completion_tokens=state.completion_tokens,
            rows_per_s=round(self._settled * per_s, 3),
            completion_tokens_per_s=round(state.completion_tokens * per_s, 3),
            exit=code,
        )


def _ok_ids(folder: Path) -> set[str]:
    if not is_run(folder):
        raise JobError(f"--skip-from {folder}: not a run folder")
    return {r["id"] for r in read_newest(folder / RESULTS) if failure_kind(r) is None}


def _tokens(store: Store) -> Usage:
    return Usage(store.totals.prompt_tokens, store.totals.completion_tokens)


def _fixed(job: JobConfig) -> int | None:
    return None if job.run.max_in_flight == "auto" else job.run.max_in_flight
