"""The run's side of several workers: hands out rows and collects the records.

Rows that a worker held when it died are answered by another worker.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import chain
from typing import Any, Protocol

from batchkit.errors import BatchkitError, EngineCrashError, EngineError, Interrupted, JobError
from batchkit.execution.cluster.actor import CLOSE_S, Actor, Place, Report, WorkerFailure
from batchkit.execution.cluster.affinity import PrefixAffinity
from batchkit.execution.cluster.leases import Leases
from batchkit.execution.cluster.ray_worker import RayWorker
from batchkit.execution.cluster.session import cause_of, needs, session
from batchkit.execution.events import EngineHistory, EngineLine, Found, Line, PoolLoad
from batchkit.execution.lane import POLL_S, Opening
from batchkit.execution.rollouts.rollouts import PausedRow
from batchkit.execution.settle import settle
from batchkit.execution.start import Start
from batchkit.execution.worker import EngineFacts, Returned
from batchkit.rendering.prefetch import read_ahead
from batchkit.rendering.row_size import size_of
from batchkit.sources.rowhash import input_hash
from batchkit.storage.ledger import RecordLine
from batchkit.storage.manifest import WorkerState
from batchkit.types import Completion, Request, Task

PLACE_S = 15.0  # how long a worker may wait for a place before that is reported
HEAVY_ROW_BYTES = 16 * 1024
_ASK_AGAIN_S = 1.0
_LOOK_S = 1.0  # between two checks of a worker that has no place yet


class DueTasks(Protocol):
    """What is still to be answered: ``Tasks``."""

    @property
    def may_wait(self) -> bool: ...

    @property
    def left(self) -> int | None:
        """Rows of this start that have no record yet; None if the total is unknown."""

    def of_turn(self) -> Iterator[Task]: ...

    def known(self, index: int) -> Sequence[Mapping[str, Any]]:
        """The generations that the ledger has of a row by now."""


class RayWorkerPool:
    """The workers of a run with ``run.workers``, used like a Worker. Made once the first worker is
    ready; the others follow. ``opening`` says how workers open their engines, but for what each of them
    has of its own.

    Raises:
        JobError: Ray is not installed, or this machine has no room for the workers.
    """

    def __init__(
        self, start: Start, due: DueTasks, engines: Sequence[str], opening: Opening
    ) -> None:
        self._start, self._due, self._engines = start, due, engines
        self._job, self._hear = start.job, opening.hear
        self._leases = Leases(start.job.run.workers or 1, quarantined=start.options.quarantined)
        self._workers: list[RayWorker] = []
        self._needs: Mapping[str, float] = {}
        self._known = dict(opening.known)
        self._broken: BatchkitError | None = None
        with ExitStack() as held:
            limit = start.job.media.max_memory_bytes  # the workers render what is read
            self._tasks = read_ahead(
                due.of_turn(), max_bytes=limit, may_wait=due.may_wait, weigh=_weight
            )
            held.enter_context(closing(self._tasks))
            self._waiting = PrefixAffinity(self._tasks)
            with opening.guard():
                held.enter_context(session(start.job))
                held.callback(self._dismiss)
                self._hire()
                self.engine_facts = self._first_engine()
            self._held = held.pop_all()

    def fill(self, *, taking: bool) -> list[Returned]:
        """Call every worker that has no pending call, with as many rows as it may have.

        Raises:
            JobError, EngineError: no worker is left, or none can load the model.
        """
        if self._broken is not None:  # raised here, because poll() may have had lines to return
            raise self._broken
        if self._tasks.broken and self._are_settled:  # rows in flight are paid for
            self._tasks.get(timeout_s=0)
        for worker in self._at_work():
            if worker.call is None:
                if worker.life.place is None:
                    if time.monotonic() < worker.begins_at:
                        continue
                    worker.life.histories = {
                        name: worker.life.history(name)._replace(steps=known.steps)
                        for name, known in self._known.items()
                    }
                    worker.call = worker.actor.begin.remote(self._known)
                else:
                    tasks: Sequence[Task] = []
                    if taking:
                        next_task = partial(self._waiting.get, worker.number)
                        leased = self._leases.lease(worker.number, self._unread(), next_task)
                        # Another worker may have held the row and died since it was read.
                        tasks = [t._replace(known=self._due.known(t.row.index)) for t in leased]
                    written, worker.life.written = worker.life.written, 0
                    worker.call = worker.actor.exchange.remote(tasks, taking, written)
                worker.called_at = time.monotonic()
        return []

    def poll(self) -> list[Returned]:
        """The records of all workers whose calls have returned."""
        workers = {worker.call: worker for worker in self._workers if worker.call is not None}
        lines: list[Returned] = []
        if not workers:
            time.sleep(POLL_S)
            return lines
        came = _wait(list(workers), 1, POLL_S)
        if came and (pending := [call for call in workers if call not in came]):
            came += _wait(pending, len(pending), 0)
        for call in came:
            workers[call].call = None
            lines += self._received(workers[call], call)
        self._watch()
        return lines

    def written(self) -> None:
        """The generations that were returned are in the ledger: the next calls tell their workers."""
        for worker in self._workers:
            worker.life.written += worker.life.returned
            worker.life.returned = 0

    @property
    def is_done(self) -> bool:
        return self._tasks.exhausted and self._are_settled

    @property
    def _are_settled(self) -> bool:
        """True if every row that was read has its record."""
        return self._leases.are_settled and not self._waiting.n_kept

    @property
    def in_flight(self) -> int:
        return sum(worker.life.load.in_flight for worker in self._at_work())

    @property
    def unfinished_tokens(self) -> int:
        return sum(worker.life.load.unfinished_tokens for worker in self._at_work())

    @property
    def load(self) -> PoolLoad:
        return sum((worker.life.load.engine for worker in self._at_work()), PoolLoad())

    @property
    def retried(self) -> int:
        return sum(worker.retried for worker in self._workers)

    def workers(self) -> list[WorkerState]:
        return [worker.noted(self._leases.holders.get(worker.number)) for worker in self._workers]

    def close(self) -> None:
        """Stop the workers, killing those that don't stop in time, and leave Ray."""
        self._held.close()

    def _first_engine(self) -> EngineFacts:
        """Wait until the first worker is ready; the others follow."""
        while True:
            self.fill(taking=True)
            if self.poll():
                raise AssertionError("no row is handed out before an engine is up")
            for worker in self._workers:
                if worker.life.engine is not None:
                    return worker.life.engine

    def _hire(self) -> None:
        import ray

        self._needs = needs(self._job, self._engines)
        hire = ray.remote(Actor).options(
            **self._needs, max_restarts=-1, max_task_retries=0, scheduling_strategy="SPREAD"
        )
        start = ray.put(self._start.for_workers())
        for number in self._leases.holders:
            actor = hire.remote(number, start, self._engines, sys.path)
            self._workers.append(RayWorker(number, actor))

    def _dismiss(self) -> None:
        if not self._workers:
            return
        import ray

        # Workers that are loading can't answer before they are done, and have nothing to close.
        farewells = [worker.actor.close.remote() for worker in self._workers if worker.life.engine]
        if farewells:
            _wait(farewells, len(farewells), CLOSE_S)
        for worker in self._workers:
            ray.kill(worker.actor)

    def _at_work(self) -> list[RayWorker]:
        """The workers that are not given up."""
        return [worker for worker in self._workers if worker.number in self._leases.holders]

    def _unread(self) -> int | None:
        """Rows that have not been handed out yet; None if unknown."""
        if self._tasks.exhausted:
            return self._waiting.n_kept
        left = self._due.left
        return None if left is None else max(1, left - self._leases.n_held)

    def _received(self, worker: RayWorker, call: Any) -> list[Returned]:
        import ray
        from ray.exceptions import ActorUnavailableError, RayError

        try:
            answer = ray.get(call)
        except ActorUnavailableError as error:
            if worker.life.place is not None:
                return self._bury(worker, error)
            worker.begins_at = time.monotonic() + _ASK_AGAIN_S  # no place yet
            return []
        except RayError as error:
            return self._bury(worker, error)
        if isinstance(answer, Place):
            worker.life.place = answer
            return []
        return self._take_in(worker, answer)

    def _take_in(self, worker: RayWorker, report: Report) -> list[Returned]:
        holder = self._leases.holders[worker.number]
        for event in report.events:
            if isinstance(event, Found):
                self._hear(event)
            else:
                self._hear(event._replace(text=f"worker {worker.number}: {event.text}"))
        for history in report.histories.values():
            self._learn(worker, history)
        life = worker.life
        if report.engine is not None and life.engine is None:
            life.engine = report.engine
            self._hear(Line(f"worker {worker.number} is up{life.where}"))
        life.load = report.load
        holder.capacity = report.load.capacity
        settled = [line.record["index"] for line in report.lines if isinstance(line, RecordLine)]
        paused = [line.index for line in report.lines if isinstance(line, PausedRow)]
        worker.rows += len(settled)
        life.returned += len(report.lines) - len(settled) - len(paused)
        for task in holder.settle([*settled, *paused]):
            self._tasks.release(task)
        if report.failure is not None:
            self._give_up(worker, report.failure)
        return list(report.lines)

    def _learn(self, worker: RayWorker, history: EngineHistory) -> None:
        """Pass what one worker's engine learned to all that start from now on: they are alike."""
        name = history.engine
        before = self._known.get(name, EngineHistory(engine=name))
        worker.life.histories = {**worker.life.histories, name: history}
        newest = [one.life.history(name) for one in self._workers]
        learned = EngineHistory(
            sum(life.history(name).restarts for one in self._workers for life in one.lives),
            max((one.steps for one in newest), key=len),
            before.among_accidents or history.among_accidents,
            tuple(chain.from_iterable(one.suspicions for one in newest)),
            name,
        )
        if learned != before:
            self._known[name] = learned
            self._hear(learned)

    def _bury(self, worker: RayWorker, error: Exception | None) -> list[Returned]:
        """Handle the death of a worker, or a lost connection: Ray starts another in its place.
        ``error`` is None if no call failed, because it died before its first."""
        from ray.exceptions import ActorDiedError, ActorUnavailableError

        holder = self._leases.holders[worker.number]
        is_gone = isinstance(error, ActorUnavailableError)  # whose message says only that
        cause = "its process or its node is gone" if is_gone else _cause(error)
        self._hear(
            EngineLine(
                f"worker {worker.number} died{worker.life.where} with {len(holder.held)} rows: {cause}"
            )
        )
        worker.bury()
        poison = holder.die("worker died")
        lines: list[Returned] = [] if poison is None else [self._quarantine(poison, cause)]
        if poison is not None:
            holder.deaths_in_a_row = 0
        elif isinstance(error, ActorDiedError):  # Ray will not restart it
            self._give_up(worker, WorkerFailure(cause, is_of_the_job=False))
        elif holder.deaths_in_a_row > self._job.run.max_engine_restarts:
            message = f"it died {holder.deaths_in_a_row} times without one answer; last: {cause}"
            self._give_up(worker, WorkerFailure(message, is_of_the_job=False))
        return lines

    def _quarantine(self, task: Task, cause: str) -> RecordLine:
        row = task.row
        self._tasks.release(task)
        self._hear(EngineLine(f"row {row.index} (id {row.id}) alone kills workers: failed"))
        error = EngineCrashError(f"the worker dies on this row alone: {cause}")
        request = Request(row, None, None, {}, input_hash(row.fields), task.attempt)
        line = settle(self._start, Completion(request, error=error))
        assert isinstance(line, RecordLine)
        return line

    def _give_up(self, worker: RayWorker, failure: WorkerFailure) -> None:
        """Continue without this worker, if others could do better."""
        import ray

        if failure.is_of_the_job and not any(one.life.engine for one in self._workers):
            self._broken = JobError(failure.message)
            return
        self._leases.give_up(worker.number)
        worker.call = None  # otherwise its end would count as another death
        ray.kill(worker.actor)  # otherwise it would hold GPUs that waiting workers need
        if self._leases.holders:
            self._hear(EngineLine(f"worker {worker.number} is given up: {failure.message}"))
        elif len(self._workers) == 1:
            self._broken = EngineError(failure.message)
        else:
            message = f"all {len(self._workers)} workers failed; the last: {failure.message}"
            self._broken = EngineError(message)

    def _watch(self) -> None:
        """Restart a worker that does not answer a call; report once that a worker waits for a
        place; record the death of one that dies before it has a place."""
        import ray

        now = time.monotonic()
        for worker in self._at_work():
            silent_s, life = now - worker.called_at, worker.life
            if self._died_unplaced(worker, now):
                self._bury(worker, None)
            elif life.place is None:
                if now - life.began_at >= PLACE_S and not life.is_said_to_wait:
                    life.is_said_to_wait = True
                    self._hear(
                        Line(
                            f"worker {worker.number} waits for a place: it needs"
                            f" {self._needs['num_cpus']:g} CPUs and {self._needs['num_gpus']:g} GPUs on"
                            " one node"
                        )
                    )
            elif worker.call is not None and silent_s >= self._job.run.stall_timeout_s:
                worker.called_at = now
                self._hear(
                    EngineLine(
                        f"worker {worker.number} is silent for {silent_s:.0f} s"
                        f" (run.stall_timeout_s = {self._job.run.stall_timeout_s:g}): restarted"
                    )
                )
                ray.kill(worker.actor, no_restart=False)

    def _died_unplaced(self, worker: RayWorker, now: float) -> bool:
        """True if Ray restarted it more often than deaths were counted; its first call waits."""
        from ray._private.state import actors

        if worker.life.place is not None or now < worker.looked_at + _LOOK_S:
            return False
        worker.looked_at = now
        return int(actors(worker.actor._actor_id.hex()).get("NumRestarts", 0)) > worker.deaths


def _cause(error: Exception | None) -> str:
    return "its process ended before it could answer" if error is None else cause_of(error)


def _weight(task: Task) -> int:
    """The size of a row if it is worth counting, for example an image or a book."""
    n_bytes = size_of(task.row.fields.values(), 2**30)
    return n_bytes if n_bytes >= HEAVY_ROW_BYTES else 0


def _wait(calls: Sequence[Any], n: int, timeout_s: float) -> list[Any]:
    """Those of ``calls`` that have ended, once ``n`` of them have or the time is over.

    Raises:
        Interrupted: instead of the SystemError that Ray's compiled code makes of it.
    """
    import ray

    try:
        return list(ray.wait(calls, num_returns=n, timeout=timeout_s)[0])
    except SystemError as error:
        if isinstance(error.__cause__, Interrupted):
            raise error.__cause__ from None
        raise
