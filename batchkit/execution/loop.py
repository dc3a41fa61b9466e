"""The main loop: fill the window, poll the engine, write the records."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager

from batchkit.engines.process.launcher import LOG
from batchkit.errors import BatchkitError, Interrupted, JobError
from batchkit.execution.cluster.pool import RayPool
from batchkit.execution.deduplicate import Answers
from batchkit.execution.engine_notes import EngineNotes
from batchkit.execution.engine_pool import EnginePool, EngineSpec, Pool, RunEngines
from batchkit.execution.first_rows import hints
from batchkit.execution.parts_thread import PartsThread
from batchkit.execution.places import Place, places_of
from batchkit.execution.requests import requests_of
from batchkit.execution.resume import OpenRun
from batchkit.execution.rollouts.rollouts import PausedRow
from batchkit.execution.screen import Screen
from batchkit.execution.start import Start
from batchkit.execution.stop import Stop
from batchkit.execution.summary import Outcome, RunSummary
from batchkit.execution.tasks import Tasks
from batchkit.execution.worker import Returned, Worker
from batchkit.runs.failures import Failure, failures_of, uncovered_in
from batchkit.storage.ledger import RecordLine
from batchkit.storage.log import RESULTS

WorkerPool = Worker | RayPool
# Interval between notes of a start's progress, as a share of its duration so far.
_NOTE_SHARE = 0.005
_BEGUN = {
    "generate": "generating",
    "embed": "embedding",
    "token_embed": "embedding tokens",
    "classify": "classifying",
    "token_classify": "classifying tokens",
    "score": "scoring pairs",
    "transcribe": "transcribing",
}


class Loop:
    """The main loop of one start. Only its thread uses the worker pool and the ledger."""

    def __init__(
        self,
        start: Start,
        run: OpenRun,
        tasks: Tasks,
        stop: Stop,
        screen: Screen,
        parts: PartsThread,
        kept: Pool | None = None,
    ) -> None:
        self._start, self._run, self._tasks = start, run, tasks
        self._stop, self._screen, self._kept = stop, screen, kept
        self._parts = parts
        self._notes = EngineNotes(start, run, tasks, screen)
        self._tokens_before = run.ledger.usage
        self._loads_s: list[float] = []
        self._seconds = 0.0
        self._counts = Counter(retried=0, reused=0, deduplicated=0)  # for the summary
        self._next_sync = self._next_note = 0.0
        self._generating_since = time.monotonic()

    def run(self) -> Outcome:
        """Run all pending rows until each is settled or the start must stop. Return the outcome."""
        try:
            if (row := self._tasks.first()) is None:
                return self._nothing_due()
            if row.error is None:
                for hint in hints(self._start.job, row.fields):
                    self._screen.say(hint)
            self._announce()
            if self._stop.check_budgets():  # before the model is loaded
                return self._stopped()
            return self._run_turns()
        finally:
            self._stop.note_gpus()  # also if a signal ends the start while the model loads
            self._tasks.input.note_changes()

    def _run_turns(self) -> Outcome:
        try:
            self._tasks.check_first_rows()
            for engines in self._tasks.of_each_turn():
                with self._opened_pool(engines) as pool:
                    self._generate(pool)
                    if self._is_cut_short(pool):
                        return self._stopped()
                    self._stop.by = None
            self._tasks.check_complete()
            self._tasks.first_failures.check(is_end=True)
            return Outcome(self._summary())
        except BatchkitError as error:
            return Outcome(self._summary(error.exit_code), error)

    def _generate(self, pool: WorkerPool) -> None:
        """Fill, poll and write until every row is settled or the start must stop."""
        self._generating_since, engine = time.monotonic(), pool.engine_facts
        self._notes.note_versions(engine.versions)
        self._screen.say(
            f"{_BEGUN[self._start.job.task]}; model loaded in {self._loads_s[-1]:.0f} s,"
            f" up to {engine.max_num_seqs} requests run at the same time"
        )
        try:
            with self._stop.request.deferred():
                while not pool.is_done and self._turn(pool):
                    pass
                if pool.is_done:
                    self._check(pool)
        except Interrupted:  # a signal during an engine restart: no request is in flight
            pass
        finally:
            self._seconds += time.monotonic() - self._generating_since
            self._counts["retried"] += pool.load.retried
            self._run.ledger.flush()
            self._note_workers(pool)
            self._screen.show(self._tasks, pool.load, force=True)

    def _check(self, pool: WorkerPool) -> None:
        """Make the self-check at the end of the run. A note says that it is due, until it has ended."""
        pool.check()
        if pool.is_checking:
            self._run.starts.note(check_is_due=True)
            self._run.starts.save()
            while pool.is_checking and self._turn(pool):
                pass
            self._run.starts.note(check_is_due=self._stop.has_begun)

    def _turn(self, pool: WorkerPool) -> bool:
        """Fill, poll and write once. Return False if the start must stop, and no request is in flight."""
        is_stopping = self._stop.check_budgets(pool.load.unfinished_tokens)
        self._write(pool.fill(taking=not is_stopping), pool)
        if is_stopping and self._stop.check_drained(pool.load.in_flight):
            return False
        self._write(pool.poll(), pool)
        self._housekeeping(pool)
        return True

    def _expected_s(self) -> float:
        """Return how many seconds this start will generate, estimated from the rows so far; 0 if unknown."""
        tasks = self._tasks
        if (total := tasks.total()) is None or not tasks.settled:
            return 0.0
        elapsed_s = time.monotonic() - self._generating_since
        return elapsed_s * (total - tasks.resumed - tasks.elsewhere) / tasks.settled

    def _write(self, lines: Sequence[Returned], pool: WorkerPool) -> None:
        """Write settled rows and generations to their logs. Record the rows that were paused until another engine is
        loaded."""
        tasks = self._tasks
        for line in lines:
            if isinstance(line, PausedRow):
                tasks.turns.pause(line)
                continue
            if isinstance(line, RecordLine):
                tasks.count(line.record)
            answer = line.record if isinstance(line, RecordLine) else line.generation
            self._counts["deduplicated"] += answer.duplicate_of is not None
            self._counts["reused"] += answer.reused_from is not None
        self._run.ledger.write(line for line in lines if not isinstance(line, PausedRow))
        pool.note_written()
        if tasks.failed:
            tasks.first_failures.check()
            self._stop.check_failures(tasks, pool.load.in_flight)

    def _housekeeping(self, pool: WorkerPool) -> None:
        """Update the screen if it is due, and write a checkpoint if its interval is over.

        If checkpoints are slow, the interval grows, so that they take at most 2 % of the time. An old checkpoint only
        means that a resume reads more of the log.
        """
        if isinstance(pool, RayPool) and self._start.job.workers.is_auto:
            self._stop.use_gpus(pool.gpus)
        if self._screen.is_due:
            self._screen.show(self._tasks, pool.load)
        if (mirror := self._run.mirror) is not None and mirror.is_due:
            mirror.offer(self._run.ledger.ends)
        if mirror is not None and (text := mirror.message()):
            self._screen.say(text)
        if (now := time.monotonic()) >= self._next_sync:
            took = self._run.ledger.sync()
            interval = max(self._start.job.run.checkpoint_interval_s, 50 * took)
            self._next_sync = now + took + interval
            self._note_progress(pool)
            for text in self._parts.messages():
                self._screen.say(text)

    def _announce(self) -> None:
        """Log how many rows earlier starts have done, and the budgets of this start."""
        if resumed := self._tasks.resumed:
            of = "" if (total := self._tasks.total(timeout_s=1)) is None else f" of {total:,}"
            self._screen.say(f"resumed {resumed:,}{of} rows")
        if budgets := self._stop.budget_line():
            self._screen.say(budgets)

    def _note_workers(self, pool: WorkerPool) -> None:
        """Note the states of workers on Ray, for ``status``."""
        if isinstance(pool, RayPool):
            self._run.starts.note(workers=pool.workers())

    def _note_progress(self, pool: WorkerPool) -> None:
        """Save facts about this start for later starts and ``status``, in case this start is killed.

        The number of rows is noted once, so that ``status`` need not count them. The other notes are repeated less
        often the longer the start takes, so that ``starts.jsonl`` stays small.
        """
        if self._run.starts.history.total is None and (total := self._tasks.total()) is not None:
            self._run.starts.learn(total=self._tasks.input.source.sample_of or total)
        if (now := time.monotonic()) >= self._next_note:
            self._next_note = now + _NOTE_SHARE * (now - self._stop.request.began)
            self._note_workers(pool)
            self._tasks.save_lengths()
            if self._start.job.budget.price_per_gpu_hour is not None:
                self._stop.note_gpus()
        self._run.starts.save()

    @contextmanager
    def _opened_pool(self, engines: Sequence[str]) -> Iterator[WorkerPool]:
        """Yield the workers once the models of ``engines`` are loaded. The first rows are rendered in the meantime."""
        started, start, tasks = time.monotonic(), self._start, self._tasks
        with ExitStack() as held:
            kept = None if tasks.turns.are_several else self._kept
            if kept is None:
                kept = held.enter_context(closing(EnginePool(self._run.folder / LOG)))
            job = start.job
            is_here = job.workers.count is None
            places = places_of(job, engines, tasks.turns.environments) if is_here else []
            self._notes.announce(engines, reused=self._reused(kept, places), places=places)
            known = self._notes.known(engines)
            # No request is in flight, so a signal stops immediately.
            guard = self._stop.request.immediate
            pool: WorkerPool
            if not is_here:
                with self._screen.waiting("waiting for a worker"):
                    of_workers = start.reusing(self._run.reused)
                    pool = RayPool(of_workers, tasks, engines, self._notes.hear, known, guard)
            else:
                due = tasks.of_turn()
                requests = requests_of(start, due, engines, may_wait=tasks.may_wait)
                opened = RunEngines(start, kept, places, self._notes.hear, known=known, guard=guard)
                held.enter_context(closing(requests))
                run = self._run
                answers = Answers(start, run.folder, run.ledger.flush, run.reused)
                held.enter_context(closing(answers))
                with self._screen.waiting("loading the model"):
                    pool = Worker(start, requests, opened, answers, self._expected_s)
            held.enter_context(closing(pool))
            self._loads_s.append(time.monotonic() - started)
            yield pool

    def _reused(self, kept: Pool, places: Sequence[Place]) -> set[str]:
        """Return the names of engines in ``kept`` that were loaded with the options and files of this run."""
        job, files = self._start.job, self._start.identity
        return {
            place.name
            for place in places
            if (loaded := kept.idle.get(place.id)) is not None
            and loaded.meets(EngineSpec(place.id, place.job_of(job).engine.options, files))
        }

    def _is_cut_short(self, pool: WorkerPool) -> bool:
        """Return whether a signal or a budget ended this start before all its rows were settled.

        This also looks for rows that were not begun: ``pool.is_done`` may be False after the last row, because the end
        of the input is found only by reading on.
        """
        if self._stop.request.signum is not None:
            return True
        if self._stop.by is None:
            return False
        return self._tasks.turns.n_paused > 0 or (not pool.is_done and self._tasks.some_are_left())

    def _nothing_due(self) -> Outcome:
        self._tasks.check_complete()
        is_empty = self._tasks.total(None) == 0 and not self._tasks.resumed
        job, why = self._start.job, self._tasks.input.source.if_empty
        if is_empty and job.input.path is not None and job.input.shard is None:
            return Outcome(self._summary(JobError.exit_code), JobError(why))
        left = "nothing left to run: every row has a record"
        if (limit := job.input.limit) is not None:
            left = (
                f"nothing left to run: the first {limit:,} rows have records; start without input.limit"
                " (--limit) to run the rest"
            )
        self._screen.say(why if is_empty else left)
        return Outcome(self._summary())

    def _stopped(self) -> Outcome:
        """Return the outcome of a start that a signal or a used-up budget has ended. The next start continues the
        run."""
        self._run.ledger.sync()
        signum = self._stop.request.signum
        return Outcome(self._summary(1 if signum is None else 128 + signum))

    def _summary(self, code: int | None = None) -> RunSummary:
        """Return the summary of this start.

        ``code``: exit code of a start that ended early. With None, all rows were read; the code then depends on failed
        rows and, in a retry, on rows without a record.
        """
        run, tasks, job = self._run, self._tasks, self._start.job
        total, failures = tasks.total(None if code is None else 0), list[Failure]()
        uncovered = 0
        if code is None:
            run.ledger.sync()  # after an error, closing the ledger still writes its lines if possible
            failures = failures_of(run.folder / RESULTS, run.ledger.totals, job)
            if job.task == "transcribe":
                uncovered = uncovered_in(run.folder / RESULTS)
            some_remain = self._start.is_retry and tasks.some_remain()
            code = 1 if some_remain else 3 if run.ledger.totals.failed else 0
        totals, usage, before = run.ledger.totals, run.ledger.usage, self._tokens_before
        completion_tokens = usage.completion_tokens - before.completion_tokens
        run.starts.learn(
            total=tasks.input.source.sample_of or total, skipped_elsewhere=tasks.elsewhere
        )
        tasks.save_lengths()
        run.starts.note(exit=code, seconds=round(self._seconds, 3))
        price = self._stop.price()
        per_s = 1 / self._seconds if self._seconds else 0.0
        return RunSummary(
            name=job.name,
            folder=str(run.folder),
            total=max(totals.ok + totals.failed + tasks.elsewhere, total or 0),
            ok=totals.ok,
            failed=totals.failed,
            skipped=tasks.resumed + tasks.elsewhere,
            **self._counts,
            seconds=round(self._seconds, 3),
            load_seconds=round(sum(self._loads_s), 3),
            prompt_tokens=usage.prompt_tokens - before.prompt_tokens,
            completion_tokens=completion_tokens,
            generations=run.ledger.steps.spent.generations,
            rows_per_s=round(tasks.settled * per_s, 3),
            completion_tokens_per_s=round(completion_tokens * per_s, 3),
            exit=code,
            stopped_by=self._stop.by,
            price=None if price is None else round(price, 6),
            failed_by_kind=totals.count_by_kind(),
            failures=failures,
            uncovered=uncovered,
            source=tasks.input.source,
            checked=run.starts.last.self_check,
            run=run.manifest.created_at,
            generates=job.generates,
        )
