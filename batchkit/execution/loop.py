"""The main loop: fill the window, poll the engine, write the records."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import chain
from typing import Any

from batchkit.config.tables import JobConfig
from batchkit.engines.process.launcher import LOG
from batchkit.errors import BatchkitError, BrokenInputError, Interrupted, TooManyFailuresError
from batchkit.execution import engine_notes
from batchkit.execution.budgets import Budgets
from batchkit.execution.cluster.worker_pool import RayWorkerPool
from batchkit.execution.events import EngineHistory, EngineLine, Event, Found, Line, Note
from batchkit.execution.fed_engine import check_same_files
from batchkit.execution.first_rows import checked
from batchkit.execution.hints import hints
from batchkit.execution.kept_engine import KeptEngine
from batchkit.execution.progress import Progress, State
from batchkit.execution.recorder import Recorder
from batchkit.execution.resume import OpenRun
from batchkit.execution.rollouts.function import Function
from batchkit.execution.rollouts.rollouts import PausedRow
from batchkit.execution.signals import DRAIN_S, StopRequest
from batchkit.execution.start_rows import StartRows
from batchkit.execution.summary import Outcome, RunSummary
from batchkit.execution.turns import Turns
from batchkit.execution.worker import Returned, Worker, render_ahead
from batchkit.rendering.ordering import well_ordered
from batchkit.rendering.steps import Renderer
from batchkit.runs.failures import Failure, failures_of
from batchkit.sources.input import Input, Total
from batchkit.storage.identity import check_found, names_same_model, of_function
from batchkit.storage.ledger import RESULTS
from batchkit.storage.store import RecordLine, Store
from batchkit.types import Completion, Request, Row, Task, Usage

WorkerPool = Worker | RayWorkerPool
_BEGUN = {
    "generate": "generating",
    "embed": "embedding",
    "classify": "classifying",
    "score": "scoring pairs",
}
_SHARE_FROM = 20  # a share of failed rows says nothing before this many are settled


class Loop:
    """One start of a run. Only its own thread uses the worker pool and the store."""

    def __init__(
        self,
        job: JobConfig,
        run: OpenRun,
        renderer: Renderer,
        progress: Progress,
        recorder: Recorder,
        stop: StopRequest,
        source: Input,
        references: Mapping[str, str | None] | None,
        engine_identity: Mapping[str, Any],
        prompt_files: Mapping[str, str],
        kept: KeptEngine | None = None,
        rollout: Function | None = None,
    ) -> None:
        self._job = job
        self._store, self._manifest, self._folder = run.store, run.manifest, run.folder
        self._save_manifest = run.save
        self._renderer = renderer
        self._progress, self._recorder = progress, recorder
        self._stop = stop
        self._prompt_files = prompt_files
        self._input = source
        self._is_retry = False
        self._rendered: dict[int, Request | Completion] = {}
        self._attempts: Mapping[int, int] = {}
        self._quarantined: Collection[int] = ()
        self._references = references
        self._engine_identity, self._function = engine_identity, of_function(job)
        self._kept, self._rollout = kept, rollout
        self._is_runs_own = names_same_model(self._manifest.identity, engine_identity)
        """False if ``--set`` gives a retry another model."""
        self._resumed = run.store.totals.ok + run.store.totals.failed
        has_answers = self._resumed > 0 or run.store.steps.count > 0
        is_bound = self._is_runs_own and has_answers
        self._found: Mapping[str, Any] = self._manifest.identity if is_bound else {}
        self._total = Total(source)
        self._tokens_before = _tokens(run.store)
        self._pool: WorkerPool | None = None
        self._stopping = False
        earlier = sum(start.gpu_seconds for start in run.manifest.starts)
        self._budgets = Budgets(job, stop.began, earlier)
        self._stopped_by: str | None = None
        self._turns = Turns(job, progress.event, keeps_rows=source.files is None)
        self._rows = StartRows(
            job, source, run.manifest, self._turns, prompt_files, has_answers=has_answers
        )
        self._restarts = Counter[tuple[int, str]]()
        self._retried = 0
        self._settled = self._failed = 0
        self._next_sync = 0.0
        self._loads_s: list[float] = []
        self._seconds = 0.0

    def run(self, is_done_elsewhere: Callable[[Row], bool]) -> Outcome:
        """Settle every row that has no record and is not done elsewhere."""
        if self._manifest.skipped_elsewhere:  # this start may take rows that an earlier one left
            self._manifest.skipped_elsewhere = 0
            self._save_manifest()
        rows = self._rows.without(self._store.totals.is_settled, is_done_elsewhere)
        return self._settle_all(rows)

    def retry(self, attempts: Mapping[int, int], quarantined: Collection[int]) -> Outcome:
        """Run the rows in ``attempts`` again; the numbers are those of their last attempts."""
        self._is_retry, self._attempts, self._quarantined = True, attempts, quarantined
        self._rows.elsewhere = self._manifest.skipped_elsewhere
        self._resumed -= sum(map(self._store.totals.is_settled, attempts))
        self._store.steps.recall(attempts)
        return self._settle_all(self._rows.only(attempts))

    def _settle_all(self, rows: Iterator[Row]) -> Outcome:
        try:
            return self._settle(rows)
        finally:
            self._note_gpus()  # also of a start that a signal ends while the model loads
            self._rows.note_changes()

    def _settle(self, rows: Iterator[Row]) -> Outcome:
        first = next(rows, None)
        if first is None:
            self._check_complete()
            is_empty = self._total.wait() == 0 and not self._resumed
            done = "nothing left to run: every row has a record"
            self._progress.event(self._input.if_empty if is_empty else done)
            return Outcome(self._summary(self._total.wait()))
        for hint in hints(self._job, first.fields) if first.error is None else ():
            self._progress.event(hint)
        if self._resumed:
            of = "" if (total := self._total.wait(timeout_s=1)) is None else f" of {total:,}"
            self._progress.event(f"resumed {self._resumed:,}{of} rows")
        if announced := self._budgets.announced(self._tokens_before):
            self._progress.event(announced)
        if self._takes_no_more():  # before the model is loaded
            return self._stopped()
        try:
            rows = chain([first], rows)
            if not (self._rows.may_wait or self._is_retry or self._store.totals.ok):
                rows, self._rendered = checked(rows, self._job, self._renderer)
            engines = self._turns.first(None if self._is_retry else self._manifest.turn)
            while True:
                with self._opened_pool(rows, engines) as self._pool:
                    self._generate(self._pool)
                    if self._stop.signum is not None or (
                        self._stopped_by and (self._turns.n_paused or self._some_are_left())
                    ):
                        return self._stopped()
                    self._stopped_by = None
                    if not self._turns.n_paused:
                        self._manifest.turn = None
                        self._check_complete()
                        return Outcome(self._summary(self._total.wait()))
                    self._retried += self._pool.retried
                engines, rows = self._next_turn()
        except BatchkitError as error:
            return Outcome(self._summary(self._total.now(), error.exit_code), error)

    def _next_turn(self) -> tuple[Sequence[str], Iterator[Row]]:
        """The engines that are loaded next, and the rows that go on with them."""
        engines, due = self._turns.next()
        self._rendered = {}
        return engines, self._turns.again(due) if self._rows.may_wait else self._rows.only(due)

    def _stopped(self) -> Outcome:
        """A signal or a used-up budget has ended this start; the next one continues."""
        self._store.sync()
        code = 1 if self._stop.signum is None else 128 + self._stop.signum
        return Outcome(self._summary(self._total.now(), code))

    def _check_complete(self) -> None:
        """All rows were read. Raises BrokenInputError if one of them has no record, or may have that
        of another prompt."""
        self._rows.check_late_files()
        if self._is_retry:
            missing = len(self._attempts) - self._settled
        else:
            total = self._total.wait()
            missing = 0 if total is None else total - self._rows.elsewhere - self._state().settled
        if missing > 0:
            raise BrokenInputError(
                f"{missing:,} rows have no record at the end: they were counted in the input or asked"
                " for, and not there when it was read. What is finished is on disk; bring the whole"
                " input back and run again"
            )

    @property
    def _some_remain(self) -> bool:
        return self._rows.some_remain(self._store.totals.is_settled)

    def _some_are_left(self) -> bool:
        """Whether this start has left some of its rows. The pool may not know yet that it had the last
        row: the input's end takes a last check."""
        if self._pool is None or self._pool.is_done:
            return False
        if self._is_retry:
            return len(self._attempts) > self._settled
        return self._rows.may_wait or self._some_remain

    @contextmanager
    def _opened_pool(self, rows: Iterator[Row], engines: Sequence[str]) -> Iterator[WorkerPool]:
        """The workers, once the models of ``engines`` are loaded; the first rows are rendered meanwhile."""
        started = time.monotonic()
        look_ahead, may_wait = self._job.run.look_ahead, self._rows.may_wait
        ordered: Iterator[tuple[Row, int]] = ((row, 0) for row in rows)
        if look_ahead > 1 and not may_wait:  # an iterator may give its rows slowly
            ordered = well_ordered(rows, self._renderer.hint, look_ahead)
        known = self._store.steps.known
        tasks = (
            Task(row, self._attempts.get(row.index, 0) + 1, group, known(row.index))
            for row, group in ordered
        )
        if self._turns.are_several:
            self._manifest.turn = engines[0]
            self._save_manifest()
        for name in engines:
            is_kept = self._kept is not None and name in self._kept.idle
            for text in engine_notes.announced(self._job, name, is_kept=is_kept):
                self._progress.event(text)
        loading = "loading the model" if self._job.run.workers is None else "waiting for a worker"
        history = {
            name: engine_notes.known(self._job, self._manifest, self._may_come, self._hear, name)
            for name in engines
        }
        with ExitStack() as held:
            pool: WorkerPool
            self._progress.start_clock(loading)
            # Loading may take minutes, with nothing in flight: a signal stops it at once.
            if self._job.run.workers is not None:
                pool = RayWorkerPool(
                    self._renderer.job,
                    tasks,
                    self._hear,
                    history,
                    engines=engines,
                    left=self._left,
                    generations=known,
                    # Workers on other machines read these files there.
                    engine_identity={
                        **self._engine_identity,
                        **self._function,
                        "prompt.files": self._prompt_files,
                    },
                    references=self._references,
                    quarantined=self._quarantined,
                    may_wait=may_wait,
                    opening=self._stop.immediate,
                )
            else:
                ahead = render_ahead(
                    self._job,
                    self._renderer,
                    tasks,
                    engines=engines,
                    may_wait=may_wait,
                    references=self._references,
                    rendered=self._rendered,
                    rollout=self._rollout,
                )
                held.enter_context(closing(ahead))
                check_same_files(self._function, of_function(self._job))  # each turn loads it again
                pool = Worker(
                    self._job,
                    self._renderer,
                    ahead,
                    self._hear,
                    history,
                    engines=engines,
                    log=self._folder / LOG,
                    engine_identity=self._engine_identity,
                    references=self._references,
                    quarantined=self._quarantined,
                    opening=self._stop.immediate,
                    kept=None if self._turns.are_several else self._kept,
                    environments=self._turns.environments,
                )
            held.enter_context(closing(pool))
            self._progress.stop_clock()
            self._loads_s.append(time.monotonic() - started)
            yield pool

    def _generate(self, pool: WorkerPool) -> None:
        began, engine = time.monotonic(), pool.engine_facts
        engine_notes.note_versions(self._manifest.last_start, engine.versions)
        self._progress.event(
            f"{_BEGUN[self._job.task]}; model loaded in {self._loads_s[-1]:.0f} s,"
            f" up to {engine.max_num_seqs} requests run at once"
        )
        try:
            with self._stop.deferred():
                self._feed(pool)
        finally:
            self._seconds += time.monotonic() - began

    def _left(self) -> int | None:
        """Rows of this start that have no record yet; None if the total is unknown."""
        if self._is_retry:
            return len(self._attempts) - self._settled
        total = self._total.now()
        done = self._rows.elsewhere + self._resumed + self._settled + self._turns.n_paused
        return None if total is None else total - done

    def _may_come(self, index: int) -> bool:
        return index in self._attempts or not self._store.totals.is_settled(index)

    def _feed(self, pool: WorkerPool) -> None:
        """Fill, poll and write until every row is settled or a stop is due."""
        try:
            while True:
                takes_no_more = self._takes_no_more()
                self._write(pool.fill(taking=not takes_no_more), pool)
                if takes_no_more and self._must_stop(pool):
                    break
                if pool.is_done:
                    break
                try:
                    lines = pool.poll()
                except Interrupted:  # during an engine restart: nothing is in flight
                    break
                self._write(lines, pool)
                self._housekeeping(pool)
        finally:
            self._store.flush()
            self._note_workers(pool)
            self._show(pool, force=True)

    def _hear(self, event: Event) -> None:
        match event:
            case Line(text):
                self._progress.event(text)
            case EngineLine(text):
                self._progress.event(text)
                self._manifest.last_start.note_event(text)
            case Note(text):
                self._progress.note(text)
            case Found(found):
                self._found = check_found(self._found, found)
                if self._is_runs_own:
                    self._manifest.identity |= {key: self._found[key] for key in found}
                    self._save_manifest()
            case EngineHistory():
                self._restarts[self._turns.number, event.engine] = event.restarts
                engine_notes.remember(self._job, self._manifest, event, self._restarts.total())
                self._save_manifest()  # at once: the next start needs it

    def _takes_no_more(self) -> bool:
        """A stop was requested, or a budget is used up: no new row begins."""
        if self._stopped_by is None:
            unfinished = self._pool.unfinished_tokens if self._pool else 0
            self._stopped_by = self._budgets.used_up(_tokens(self._store, unfinished))
        return self._stop.signum is not None or self._stopped_by is not None

    def _must_stop(self, pool: WorkerPool) -> bool:
        """No new row begins: report it once; True when the loop must not wait any longer."""
        drain_s = DRAIN_S if self._stop.signum is not None else self._budgets.drain_s
        is_due = self._stop.is_due or drain_s == 0
        if not self._stopping and pool.in_flight and not is_due:
            self._stopping = True
            cause = f" at {self._stopped_by}" if self._stopped_by else ""
            time_left = "waiting" if drain_s is None else f"up to {drain_s:.0f} s"
            self._progress.event(
                f"stopping{cause}: {time_left} for {pool.in_flight} rows in flight;"
                " interrupt again to stop now"
            )
        return is_due or not pool.in_flight

    def _write(self, lines: Sequence[Returned], pool: WorkerPool) -> None:
        """Write settled rows to the log, and generations; then check whether too many failed. Rows that
        another engine has to go on with are noted."""
        for line in lines:
            if isinstance(line, RecordLine):
                self._store.copy(line)
                self._settled += 1
                self._failed += line.record["status"] != "ok"
                self._turns.settle(line.record["index"])
            elif isinstance(line, PausedRow):
                self._turns.pause(line)
            else:
                self._store.copy_generation(line)
        self._store.flush_if_due()
        pool.written()
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
        begun = self._settled + (self._pool.in_flight if self._pool else 0)
        return begun >= _SHARE_FROM and self._failed > limit * begun

    def _housekeeping(self, pool: WorkerPool) -> None:
        """Update the progress at every call; write a checkpoint when its interval is over.

        The interval grows if checkpoints are slow, so that they cost at most a fiftieth of the
        time: the checkpoint is a cache, and an old one only makes a resume read more of the log.
        """
        self._show(pool)
        if self._manifest.total is None and (total := self._total.now()) is not None:
            self._manifest.total = self._input.sample_of or total  # status need not count the rows
            self._save_manifest()
        now = time.monotonic()
        if now >= self._next_sync:
            took = self._store.sync()
            interval = max(self._job.run.checkpoint_interval_s, 50 * took)
            self._next_sync = now + took + interval
            if self._note_workers(pool) | self._note_gpus():
                self._save_manifest()

    def _show(self, pool: WorkerPool, *, force: bool = False) -> None:
        state = self._state()
        self._progress.update(state, force=force)
        self._recorder.update(state, pool, force=force)

    def _note_workers(self, pool: WorkerPool) -> bool:
        """Note the state of each of several workers for ``status``; False if there is only one."""
        if workers := pool.workers():
            self._manifest.last_start.workers = workers
        return bool(workers)

    def _note_gpus(self) -> bool:
        """Note for how long GPUs were held; True if it has to be on disk: the job has a price for them."""
        self._manifest.last_start.gpu_seconds = round(self._budgets.gpu_seconds, 3)
        return self._budgets.count_gpus

    def _state(self) -> State:
        totals, before = self._store.totals, self._tokens_before
        now = _tokens(self._store)
        return State(
            total=None if (total := self._total.now()) is None else total - self._rows.elsewhere,
            ok=totals.ok,
            failed=totals.failed,
            resumed=self._resumed,
            in_flight=self._pool.in_flight if self._pool else 0,
            prompt_tokens=now.prompt_tokens - before.prompt_tokens,
            completion_tokens=now.completion_tokens - before.completion_tokens,
            unfinished_tokens=self._pool.unfinished_tokens if self._pool else 0,
            generations=self._store.steps.count,
        )

    def _summary(self, total: int | None, code: int | None = None) -> RunSummary:
        """How the run ended; without ``code``, it depends on rows left (retry) or failed."""
        if code is None:
            self._store.sync()  # after an error, closing the store writes what it can
        state, failures = self._state(), list[Failure]()
        if code is None:
            failures = failures_of(self._folder / RESULTS, self._store.totals, self._job)
            code = 1 if self._is_retry and self._some_remain else 3 if state.failed else 0
        self._manifest.total = self._input.sample_of or total
        self._manifest.skipped_elsewhere = self._rows.elsewhere
        self._manifest.last_start.exit = code
        self._manifest.last_start.seconds = round(self._seconds, 3)
        price = self._budgets.price(_tokens(self._store))
        per_s = 1 / self._seconds if self._seconds else 0.0
        return RunSummary(
            name=self._job.name,
            folder=str(self._folder),
            total=max(state.settled + self._rows.elsewhere, total or 0),
            ok=state.ok,
            failed=state.failed,
            skipped=self._resumed + self._rows.elsewhere,
            retried=self._retried + (self._pool.retried if self._pool else 0),
            seconds=round(self._seconds, 3),
            load_seconds=round(sum(self._loads_s), 3),
            prompt_tokens=state.prompt_tokens,
            completion_tokens=state.completion_tokens,
            generations=state.generations,
            rows_per_s=round(self._settled * per_s, 3),
            completion_tokens_per_s=round(state.completion_tokens * per_s, 3),
            exit=code,
            stopped_by=self._stopped_by,
            price=None if price is None else round(price, 6),
            failed_by_kind=self._store.totals.count_by_kind(),
            failures=failures,
            source=self._input,
            run=self._manifest.created_at,
            generates=self._job.task == "generate",
        )


def _tokens(store: Store, unfinished: int = 0) -> Usage:
    return Usage(store.usage.prompt_tokens, store.usage.completion_tokens + unfinished)
