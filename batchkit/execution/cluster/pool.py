"""The run's side of workers on Ray: gives rows to them and collects the records."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from typing import Any

from batchkit.errors import (
    BatchkitError,
    EngineCrashError,
    EngineError,
    Interrupted,
    JobError,
    WrongAnswersError,
)
from batchkit.execution.cluster.actor import CLOSE_S, WorkerReport
from batchkit.execution.cluster.head import Head, is_gone
from batchkit.execution.cluster.hiring import Hiring
from batchkit.execution.cluster.leases import Leases, RayWorker
from batchkit.execution.cluster.session import cause_of, session
from batchkit.execution.completions import to_line
from batchkit.execution.events import (
    EngineHistory,
    EngineMessage,
    Found,
    Hear,
    Load,
    Message,
    SelfChecked,
)
from batchkit.execution.lane import POLL_S
from batchkit.execution.rollouts.rollouts import PausedRow
from batchkit.execution.self_check import is_checked
from batchkit.execution.start import Start
from batchkit.execution.tasks import Tasks
from batchkit.execution.worker import EngineFacts, Returned
from batchkit.rendering.ordering import size_of
from batchkit.rendering.prefetch import read_ahead
from batchkit.sources.rowhash import input_hash
from batchkit.storage.ledger import RecordLine
from batchkit.storage.starts import WorkerState
from batchkit.types import Completion, Request, Task, utc_now

HEAVY_ROW_BYTES = 16 * 1024  # smaller rows don't count toward the limit on bytes read ahead


class RayPool:
    """The workers of a run with ``workers.count``. It has the interface of Worker.

    The constructor returns once the first worker is ready (with ``workers.min``, once that many are); the others follow.
    If a worker dies, another worker answers its rows.

    With ``workers.count = "auto"``, a worker leaves with its node, or when the node drains; it is not restarted.

    - ``hear``: receives the events of the workers and their engines.
    - ``known``: histories of earlier starts, by engine.
    - ``guard``: surrounds the start of the workers.

    Raises:
        JobError: Ray is not installed, or this machine has too few GPUs for the workers.
    """

    def __init__(
        self,
        start: Start,
        tasks: Tasks,
        engines: Sequence[str],
        hear: Hear,
        known: Mapping[str, EngineHistory],
        guard: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._start, self._due, self._hear = start, tasks, hear
        self._leases = Leases(start.options.quarantined)
        self._broken: BatchkitError | None = None
        self._asks_for_check = False
        with ExitStack() as held:
            limit = start.job.media.max_memory_bytes  # here it limits the bytes of rows read ahead
            self._tasks = read_ahead(
                tasks.of_turn(), max_bytes=limit, may_wait=tasks.may_wait, weigh=_weight
            )
            held.enter_context(closing(self._tasks))
            with guard():
                held.enter_context(session(start.job))
                self._head = Head(is_auto=start.job.workers.is_auto)
                self._hiring = Hiring(start, engines, hear, known, self._leases)
                held.callback(self._dismiss)
                for _ in range(start.job.workers.least):
                    self._hiring.hire()
                self.engine_facts = self._first_engines()
            self._held = held.pop_all()

    def fill(self, *, taking: bool) -> list[Returned]:
        """Call ``exchange`` of every worker that has no pending call. With ``taking``, send each of these workers rows
        up to its capacity.

        Raises:
            JobError, EngineError: no worker is left, or none can load the model.
        """
        # Raised here and not in poll(), which may have lines to return.
        if (broken := self._head.failure or self._broken) is not None:
            raise broken
        if self._tasks.will_raise and self._leases.is_done:  # rows in flight are finished first
            self._tasks.get(timeout_s=0)  # raises the input's error
        if taking:
            self._hiring.resize(all_read=self._tasks.exhausted)
        for worker in self._leases.workers.values():
            life, tasks = worker.life, list[Task]()
            if life.call is not None:
                continue
            node = None if life.place is None else life.place.node_id
            worker.is_draining = node in self._head.draining
            its_taking = taking and not worker.is_draining
            if its_taking and worker.has_place:
                leased = self._leases.lease(worker.number, self._unread(), self._next_task)
                # After the row was read, a worker that has since died may have written generations of the row.
                tasks = [t._replace(known=self._due.known(t.row.index)) for t in leased]
            written, life.written = life.written, 0
            life.call = life.actor.exchange.remote(
                tasks, its_taking, written, self._asks_for_check, len(self._leases.workers)
            )
            life.called_at = time.monotonic()
            # Until the worker reports its load, so that a stop waits for the answers to these rows.
            life.load = life.load._replace(in_flight=life.load.in_flight + len(tasks))
        return []

    def poll(self) -> list[Returned]:
        """Return the lines of all calls of ``exchange`` that have ended."""
        import ray
        from ray.exceptions import RayError

        workers = {one.life.call: one for one in self._hiring.workers if one.life.call is not None}
        lines: list[Returned] = []
        if not workers:
            time.sleep(POLL_S)
            return lines
        came = _wait(list(workers), 1, POLL_S)
        if came and (pending := [call for call in workers if call not in came]):
            came += _wait(pending, len(pending), 0)
        for call in came:
            (worker := workers[call]).life.call = None
            try:
                lines += self._take_in(worker, ray.get(call))
            except RayError as error:
                lines += self._bury(worker, error)
        self._hiring.report_waiting()
        self._kill_silent()
        self._head.watch()
        return lines

    def note_written(self) -> None:
        """Remember that all returned generations are in the ledger. The next call of ``exchange`` tells each worker."""
        for worker in self._hiring.workers:
            worker.life.written += worker.life.returned
            worker.life.returned = 0

    @property
    def is_done(self) -> bool:
        return self._tasks.exhausted and self._leases.is_done

    def check(self) -> None:
        """Begin the self-check at the end of the run on every worker, with the next call of ``exchange``."""
        self._asks_for_check = is_checked(self._start.job)

    @property
    def is_checking(self) -> bool:
        """True until every ready worker has ended its self-check."""
        lives = [worker.life for worker in self._leases.workers.values()]
        return self._asks_for_check and any(life.engine and not life.is_checked for life in lives)

    @property
    def load(self) -> Load:
        at_work = sum((worker.life.load for worker in self._leases.workers.values()), Load())
        return at_work._replace(retried=sum(worker.retried for worker in self._hiring.workers))

    def workers(self) -> list[WorkerState]:
        """Return the states of the workers."""
        return self._hiring.noted()

    @property
    def gpus(self) -> float:
        """The number of GPUs that workers hold now."""
        return self._start.job.worker_gpus * self._hiring.n_placed

    def close(self) -> None:
        """Stop the workers, kill workers that don't stop in time, and leave Ray."""
        self._held.close()

    def _first_engines(self) -> EngineFacts:
        """Wait until the first worker is ready, or with ``workers.min`` the first few. Return the facts of an engine."""
        table = self._start.job.workers
        least = table.min if table.is_auto else 1
        while True:
            self._hiring.resize(all_read=self._tasks.exhausted)
            self.fill(taking=False)
            if self.poll():
                raise AssertionError("a worker returned results before it got a row")
            ready = [one.life.engine for one in self._leases.workers.values() if one.life.engine]
            if len(ready) >= least:
                return ready[0]

    def _dismiss(self) -> None:
        if self._head.failure is not None:
            return  # Ray would not answer; the workers end with this process
        lives = [worker.life for worker in self._leases.workers.values()]
        # Workers that are loading can't answer before they are done, and have nothing to close.
        farewells = [life.actor.close.remote() for life in lives if life.engine]
        if farewells:
            _wait(farewells, len(farewells), CLOSE_S)
        for life in lives:
            life.kill()

    def _next_task(self) -> Task | None:
        """Return the next task, or None if none can be read now."""
        return None if self._tasks.will_raise else self._tasks.get(timeout_s=0)

    def _unread(self) -> int | None:
        """Return the number of rows not handed out yet; None if unknown."""
        if self._tasks.exhausted:
            return 0
        left = self._due.left
        return None if left is None else max(1, left - self._leases.n_held)

    def _take_in(self, worker: RayWorker, report: WorkerReport) -> list[Returned]:
        for event in report.events:
            if isinstance(event, EngineHistory):
                self._hiring.learn(worker, event)
            elif isinstance(event, Found | SelfChecked):
                self._hear(event)
            else:
                self._hear(event._replace(text=f"worker {worker.number}: {event.text}"))
        life = worker.life
        life.place, worker.joined_at = report.place, worker.joined_at or utc_now()
        if report.engine is not None and life.engine is None:
            life.engine, worker.up_since = report.engine, worker.up_since or time.monotonic()
            self._hear(Message(f"worker {worker.number} is ready{life.where}"))
        life.load, life.is_checked = report.load, report.is_checked
        worker.capacity = 2 * report.load.window  # one half in flight, the other being rendered
        settled = [line.record.index for line in report.lines if isinstance(line, RecordLine)]
        paused = [line.index for line in report.lines if isinstance(line, PausedRow)]
        worker.rows += len(settled)
        life.returned += len(report.lines) - len(settled) - len(paused)
        for task in worker.give_back([*settled, *paused]):
            self._tasks.release(task)
        if report.failure is not None:
            self._give_up(worker, report.failure)
        elif worker.is_draining and not life.load.in_flight:
            n_rows = len(worker.held)
            self._leases.leave(worker.number)
            self._let_go(worker, "drained", f"its node drains; {n_rows} rows go to other workers")
        return report.lines

    def _bury(self, worker: RayWorker, error: Exception) -> list[Returned]:
        """Start a new process for a worker that died or was lost. If a row is now proven to be the cause, return its
        record."""
        from ray.exceptions import ActorUnavailableError, RayActorError

        is_auto = self._start.job.workers.is_auto
        if is_auto and worker.life.place and is_gone(worker.life.place.node_id):
            n_rows, why = len(worker.held), "its node was lost"
            lost = self._leases.lose(worker.number, why)
            self._let_go(worker, "node lost", f"{why} with {n_rows} rows")
            return [] if lost is None else [self._quarantine(lost, why)]
        is_silent = isinstance(error, ActorUnavailableError)  # its own message tells nothing more
        cause = "its process or its node has died" if is_silent else cause_of(error)
        self._say(
            f"worker {worker.number} died{worker.life.where} with {len(worker.held)} rows: {cause}"
        )
        worker.life.kill()
        poison = self._leases.die(worker.number, "worker died")
        lines: list[Returned] = [] if poison is None else [self._quarantine(poison, cause)]
        if poison is not None:
            worker.deaths_in_a_row = 0
        elif isinstance(error, RayActorError) and error.actor_init_failed:
            self._give_up(worker, EngineError(cause))
        elif worker.deaths_in_a_row > self._start.job.run.max_engine_restarts:
            message = (
                f"the worker died {worker.deaths_in_a_row} times without an answer (run.max_engine_restarts); the last"
                f" time: {cause}"
            )
            self._give_up(worker, EngineError(message))
        if worker.left_at is None:
            self._hiring.begin(worker)
        return lines

    def _let_go(self, worker: RayWorker, state: str, why: str) -> None:
        """End a worker that has left the leases, because its node was lost or drains."""
        self._say(f"worker {worker.number} has left{worker.life.where}: {why}")
        worker.leave(state)

    def _quarantine(self, task: Task, cause: str) -> RecordLine:
        row = task.row
        self._tasks.release(task)
        self._say(
            f"row {row.index} (id {row.id}) kills workers even if it runs alone: the row has failed"
        )
        error = EngineCrashError(f"the worker dies even if this row runs alone: {cause}")
        request = Request(row, None, None, {}, input_hash(row.fields), task.attempt)
        line = to_line(self._start, Completion(request, error=error))
        assert isinstance(line, RecordLine)
        return line

    def _give_up(self, worker: RayWorker, failure: BatchkitError) -> None:
        """Continue without this worker. Stop the run instead if the failure would occur on every worker, or no worker
        is left."""
        is_for_all = isinstance(failure, JobError) and not any(
            one.life.engine for one in self._hiring.workers
        )
        if is_for_all or isinstance(failure, WrongAnswersError):
            self._broken = failure
            return
        self._hiring.give_up(worker, failure)
        if self._start.job.workers.is_auto or self._leases.workers:
            self._say(f"worker {worker.number} failed and is not restarted: {failure}")
        elif len(self._hiring.workers) == 1:
            self._broken = EngineError(str(failure))
        else:
            n = len(self._hiring.workers)
            self._broken = EngineError(f"all {n} workers failed; the last error: {failure}")

    def _kill_silent(self) -> None:
        """Kill workers that don't answer for ``run.stall_timeout_s``."""
        now, stall_s = time.monotonic(), self._start.job.run.stall_timeout_s
        for worker in self._leases.workers.values():
            life = worker.life
            silent_s = now - life.called_at
            if worker.has_place and life.call is not None and silent_s >= stall_s:
                life.called_at = now
                self._say(
                    f"worker {worker.number} has not answered for {silent_s:.0f} s"
                    f" (run.stall_timeout_s = {stall_s:g}): restarted"
                )
                life.kill()

    def _say(self, text: str) -> None:
        self._hear(EngineMessage(text))


def _weight(task: Task) -> int:
    """Return the bytes that a row counts toward the limit on rows read ahead: its size if it is large, otherwise 0."""
    n_bytes = size_of(task.row.fields.values(), 2**30)
    return n_bytes if n_bytes >= HEAVY_ROW_BYTES else 0


def _wait(calls: Sequence[Any], n: int, timeout_s: float) -> list[Any]:
    """Wait until ``n`` of ``calls`` have ended, at most ``timeout_s``. Return the calls that have ended.

    Raises:
        Interrupted: a signal arrived. Ray's compiled code turns this exception into a SystemError, which is turned back
            here.
    """
    import ray

    try:
        return list(ray.wait(calls, num_returns=n, timeout=timeout_s)[0])
    except SystemError as error:
        if isinstance(error.__cause__, Interrupted):
            raise error.__cause__ from None
        raise
