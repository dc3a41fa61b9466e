"""Several workers, placed, pinned to their GPUs and restarted by Ray. The only file that touches it.

The run hands out rows in leases and is the only one that writes (``leases.py`` says who gets how
many). In each actor stands a Worker on a thread of its own; a call to ``exchange`` brings rows and
takes records along, and is never long: it is the worker's sign of life, too. Rows travel as they were
read: what they name (images, texts) is opened by the worker. What a worker can't hand over, because
it died, is answered again by another.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple
from uuid import uuid4

from batchkit.config import JobConfig
from batchkit.engines import LIGHT
from batchkit.engines.launcher import LOG
from batchkit.errors import BatchkitError, EngineCrashError, EngineError, JobError
from batchkit.leases import Leases
from batchkit.prefetch import Prefetch
from batchkit.prompts import PromptRenderer
from batchkit.records import to_record
from batchkit.rowhash import input_hash
from batchkit.scoring import Scored, kept_fields
from batchkit.stopping import Interrupted
from batchkit.store import Line, line_of
from batchkit.supervisor import Lessons
from batchkit.types import Completion, Request, Task
from batchkit.worker import POLL_S, EngineFacts, Listener, Worker

READ_AHEAD = 1024
READ_AT_ONCE = 16
GATHER_S = 0.1  # records that come within it travel together
HEARTBEAT_S = 0.5  # without any, a call comes back after it
CLOSE_S = 30.0
CONNECT_S = 10.0
PLACE_S = 15.0  # so long a worker may wait for its place before that is told
_ASK_AGAIN_S = 1.0
_OBJECT_STORE_BYTES = 512 * 2**20
_TOLD = ("index", "status", "usage", "error")  # what the ledger counts of a record


class Place(NamedTuple):
    """Where a worker runs."""

    node: str
    gpus: Sequence[int | str]


class Failure(NamedTuple):
    """Why a worker can't go on. ``is_of_the_job``: no other could."""

    message: str
    is_of_the_job: bool


class Report(NamedTuple):
    """What a worker tells: ``events`` are (name of a Listener's ear, text)."""

    lines: Sequence[Line]
    events: Sequence[tuple[str, str]]
    lessons: Lessons | None
    engine: EngineFacts | None
    failure: Failure | None
    in_flight: int
    retried: int
    appetite: int


class Actor:
    """One worker's process, as Ray calls it: from one thread, one call at a time."""

    def __init__(
        self,
        number: int,
        job: JobConfig,
        references: Mapping[str, str | None] | None,
        convicted: Collection[int],
    ) -> None:
        self._number = number
        self._job = job
        self._references = references
        self._convicted = convicted
        self._inbox: SimpleQueue[Task | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._taking = True
        self._closed = False
        self._unsettled = 0
        self._lines: list[Line] = []
        self._events: list[tuple[str, str]] = []
        self._lessons: Lessons | None = None
        self._engine: EngineFacts | None = None
        self._failure: Failure | None = None
        self._load = (0, 0, 0)

    def begin(self, known: Lessons) -> Place:
        """Load the model, on a thread of its own."""
        import ray

        if self._thread is not None:  # the run takes this worker for dead: be it
            os._exit(1)
        self._thread = threading.Thread(target=self._work, args=(known,), name="worker")
        self._thread.daemon = True
        self._thread.start()
        return Place(socket.gethostname(), ray.get_gpu_ids())

    def exchange(self, tasks: Sequence[Task], taking: bool) -> Report:
        """Take ``tasks``; bring what has been settled since, after a wait for it.

        Raises:
            RuntimeError: Ray has restarted this process since ``begin``, unseen by the run.
        """
        if self._thread is None:
            raise RuntimeError("its process is a new one")
        self._taking = taking
        for task in tasks:
            self._inbox.put(task)
        with self._changed:
            self._unsettled += len(tasks)
            self._changed.wait_for(
                lambda: self._lines or self._events or self._failure, HEARTBEAT_S
            )
            if self._lines:
                enough = self._unsettled // 2
                self._changed.wait_for(
                    lambda: len(self._lines) >= enough or self._failure, GATHER_S
                )
            lines, self._lines = self._lines, []
            events, self._events = self._events, []
            self._unsettled -= len(lines)
            in_flight, retried, appetite = self._load
            return Report(
                lines,
                events,
                self._lessons,
                self._engine,
                self._failure,
                in_flight,
                retried,
                appetite,
            )

    def close(self) -> None:
        """Drop what is in flight and give the GPU back."""
        self._closed = True
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _work(self, known: Lessons) -> None:
        try:
            worker = Worker(
                self._job,
                PromptRenderer(self._job),
                iter(self._inbox.get, None),
                Listener(
                    lambda text: self._hear("event", text),
                    lambda text: self._hear("engine_event", text),
                    lambda text: self._hear("note", text),
                    self._learn,
                ),
                log=_engine_log(self._job.folder, self._number),
                references=self._references,
                convicted=self._convicted,
                may_wait=True,
            )
            with closing(worker):
                try:
                    self._answer(worker, known)
                finally:
                    self._inbox.put(None)  # else its rendering threads would wait for more rows
        except BatchkitError as error:
            self._fail(Failure(str(error), isinstance(error, JobError)))
        except BaseException:
            self._fail(Failure(traceback.format_exc(), is_of_the_job=False))

    def _answer(self, worker: Worker, known: Lessons) -> None:
        engine = worker.open(known)
        with self._changed:
            self._engine = engine
        while not self._closed:
            taking = self._taking
            self._bring(worker, worker.fill(taking=taking))
            self._bring(worker, worker.poll())
            if not taking and not worker.in_flight:
                time.sleep(POLL_S)

    def _bring(self, worker: Worker, lines: Sequence[Line]) -> None:
        with self._changed:
            self._load = (worker.in_flight, worker.retried, worker.appetite)
            for line in lines:
                self._lines.append(Line(line.raw, {name: line.told[name] for name in _TOLD}))
            if lines:
                self._changed.notify_all()

    def _hear(self, ear: str, text: str) -> None:
        with self._changed:
            self._events.append((ear, text))
            self._changed.notify_all()

    def _learn(self, lessons: Lessons) -> None:
        with self._changed:
            self._lessons = lessons

    def _fail(self, failure: Failure) -> None:
        with self._changed:
            self._failure = failure
            self._changed.notify_all()


class _Seat:
    """A worker as the run sees it, through all its restarts. ``call`` is the one under way."""

    def __init__(self, number: int, actor: Any) -> None:
        self.number = number
        self.actor = actor
        self.call: Any = None
        self.called_at = 0.0
        self.place: Place | None = None
        self.engine: EngineFacts | None = None
        self.in_flight = 0
        self.rows = self.deaths = 0
        self.state = "waiting for a place"
        self.begins_at = self.waits_since = time.monotonic()
        self.told_to_wait = False
        # Of this life of the worker's, and of those before it.
        self.engine_restarts = self.engine_restarts_before = 0
        self.retried = self.retried_before = 0

    def bury(self) -> None:
        """This life is over."""
        self.place = self.engine = None
        self.in_flight = 0
        self.deaths += 1
        self.state = "waiting for a place"
        self.begins_at = self.waits_since = time.monotonic()
        self.told_to_wait = False
        self.engine_restarts_before += self.engine_restarts
        self.retried_before += self.retried
        self.engine_restarts = self.retried = 0


class RayCrew:
    """The Crew of a run with ``run.workers``. ``left``: how many rows of this start have no record yet.

    ``opening`` is entered while the first model loads; other arguments are as Worker's.

    Raises:
        JobError: Ray is not installed, or this machine has no room for the workers.
    """

    def __init__(
        self,
        job: JobConfig,
        tasks: Iterator[Task],
        listener: Listener,
        *,
        left: Callable[[], int | None],
        references: Mapping[str, str | None] | None = None,
        convicted: Collection[int] = (),
        may_wait: bool = False,
        opening: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._job = job
        self._listener = listener
        self._left = left
        self._references = references
        self._convicted = convicted
        self._opening = opening
        self._kept = kept_fields(job)
        self._leases = Leases(job.run.workers or 1)
        self._seats: list[_Seat] = []
        self._known = Lessons(0, [], False)
        self._broken: BatchkitError | None = None
        self._held = ExitStack()
        # On a thread of its own, as reading may wait; what it reads is rendered by the workers.
        self._tasks = Prefetch(
            tasks,
            lambda task: task,
            threads=1,
            ahead=READ_AHEAD,
            max_bytes=job.media.max_memory_bytes,
            at_once=1 if may_wait else READ_AT_ONCE,
        )
        self._held.enter_context(closing(self._tasks))

    def open(self, known: Lessons) -> EngineFacts:
        """As ``Crew``: returns when the first worker is up; the others follow."""
        self._known = known
        with self._opening():
            self._held.enter_context(_session(self._job))
            self._hire()
            while True:
                self.fill(taking=True)
                if self.poll():
                    raise AssertionError("no row is handed out before an engine is up")
                for seat in self._seats:
                    if seat.engine is not None:
                        return seat.engine

    def fill(self, *, taking: bool) -> list[Line]:
        """Call every worker that is not being called, with as many rows as it may have.

        Raises:
            JobError, EngineError: no worker is left, or none can load the model.
        """
        if self._broken is not None:  # raised here, as poll() may have had lines to hand on
            raise self._broken
        if self._tasks.broken and self._leases.are_settled:  # not before: what is out is paid for
            self._tasks.get(timeout_s=0)
        for seat in self._seats:
            if seat.call is None and seat.number in self._leases.holders:
                if seat.place is None:
                    if time.monotonic() < seat.begins_at:
                        continue
                    seat.call = seat.actor.begin.remote(self._known)
                else:
                    tasks: Sequence[Task] = []
                    if taking:
                        tasks = self._leases.lease(seat.number, self._unread(), self._next_task)
                    seat.call = seat.actor.exchange.remote(tasks, taking)
                seat.called_at = time.monotonic()
        return []

    def poll(self) -> list[Line]:
        """What came back, of all workers that have something."""
        seats = {seat.call: seat for seat in self._seats if seat.call is not None}
        lines: list[Line] = []
        if not seats:
            time.sleep(POLL_S)
            return lines
        came = _wait(list(seats), 1, POLL_S)
        if came and (pending := [call for call in seats if call not in came]):
            came += _wait(pending, len(pending), 0)
        for call in came:
            seats[call].call = None
            lines += self._received(seats[call], call)
        self._watch()
        return lines

    @property
    def is_done(self) -> bool:
        return self._tasks.exhausted and self._leases.are_settled

    @property
    def in_flight(self) -> int:
        return sum(seat.in_flight for seat in self._seats)

    @property
    def retried(self) -> int:
        return sum(seat.retried + seat.retried_before for seat in self._seats)

    def workers(self) -> list[dict[str, Any]]:
        """One table each: its place, its rate, and what befell it."""
        return [self._told(seat) for seat in self._seats]

    def close(self) -> None:
        """End the workers, those that don't end in time by force, and leave Ray."""
        try:
            self._dismiss()
        finally:
            self._held.close()

    def _hire(self) -> None:
        import ray

        its_needs = needs(self._job)
        hire = ray.remote(Actor).options(
            **its_needs, max_restarts=-1, max_task_retries=0, scheduling_strategy="SPREAD"
        )
        references = None if self._references is None else ray.put(self._references)
        for number in self._leases.holders:
            actor = hire.remote(number, self._job, references, self._convicted)
            self._seats.append(_Seat(number, actor))

    def _dismiss(self) -> None:
        if not self._seats:
            return
        import ray

        # Those that are loading hear nothing before they are done, and have nothing to end.
        farewells = [seat.actor.close.remote() for seat in self._seats if seat.engine is not None]
        if farewells:
            _wait(farewells, len(farewells), CLOSE_S)
        for seat in self._seats:
            ray.kill(seat.actor)

    def _next_task(self) -> Task | None:
        return None if self._tasks.broken else self._tasks.get(timeout_s=0)

    def _unread(self) -> int | None:
        """How many rows have not been handed out yet; None where nobody knows."""
        if self._tasks.exhausted:
            return 0
        left = self._left()
        return None if left is None else max(1, left - self._leases.n_held)

    def _received(self, seat: _Seat, call: Any) -> list[Line]:
        import ray
        from ray.exceptions import ActorUnavailableError, RayError

        try:
            told = ray.get(call)
        except ActorUnavailableError as error:
            if seat.place is not None:
                return self._bury(seat, error)
            seat.begins_at = time.monotonic() + _ASK_AGAIN_S  # it has no place yet
            return []
        except RayError as error:
            return self._bury(seat, error)
        if isinstance(told, Place):
            seat.place = told
            seat.state = "loading"
            return []
        return self._take_in(seat, told)

    def _take_in(self, seat: _Seat, report: Report) -> list[Line]:
        holder = self._leases.holders[seat.number]
        for ear, text in report.events:
            getattr(self._listener, ear)(f"worker {seat.number}: {text}")
        if report.lessons is not None:
            self._learn(seat, report.lessons)
        if report.engine is not None and seat.engine is None:
            seat.engine, seat.state = report.engine, "working"
            self._listener.event(f"worker {seat.number} is up{_at(seat.place)}")
        seat.in_flight, seat.retried = report.in_flight, report.retried
        holder.appetite = report.appetite
        seat.rows += len(report.lines)
        holder.settle([line.told["index"] for line in report.lines])
        if report.failure is not None:
            self._give_up(seat, report.failure)
        return list(report.lines)

    def _learn(self, seat: _Seat, lessons: Lessons) -> None:
        """What one worker's engine taught holds for all: they are alike."""
        seat.engine_restarts = lessons.restarts
        steps = max(self._known.steps, lessons.steps, key=len)
        restarts = sum(one.engine_restarts + one.engine_restarts_before for one in self._seats)
        among_accidents = self._known.among_accidents or lessons.among_accidents
        learned = Lessons(restarts, steps, among_accidents)
        if learned != self._known:
            self._known = learned
            self._listener.remember(learned)

    def _bury(self, seat: _Seat, error: Exception) -> list[Line]:
        """The worker is dead, or can't be reached: Ray starts another in its place."""
        from ray.exceptions import ActorDiedError, ActorUnavailableError

        holder = self._leases.holders[seat.number]
        is_gone = isinstance(error, ActorUnavailableError)  # whose message says no more than that
        cause = "its process or its node is gone" if is_gone else _shortened(error)
        self._listener.engine_event(
            f"worker {seat.number} died{_at(seat.place)} with {len(holder.held)} rows: {cause}"
        )
        seat.bury()
        poison = holder.die("worker died")
        lines = [] if poison is None else [self._convict(poison, cause)]
        if poison is not None:
            holder.deaths_in_a_row = 0
        elif isinstance(error, ActorDiedError):  # for good
            self._give_up(seat, Failure(cause, is_of_the_job=False))
        elif holder.deaths_in_a_row > self._job.run.max_engine_restarts:
            told = f"it died {holder.deaths_in_a_row} times without one answer; last: {cause}"
            self._give_up(seat, Failure(told, is_of_the_job=False))
        return lines

    def _convict(self, task: Task, cause: str) -> Line:
        row = task.row
        self._listener.engine_event(f"row {row.index} (id {row.id}) alone kills workers: failed")
        error = EngineCrashError(f"the worker dies on this row alone: {cause}")
        request = Request(row, None, None, {}, input_hash(row.fields), task.attempt)
        scored = Scored(None, {}) if self._job.scoring.is_on else None
        return line_of(to_record(Completion(request, error=error), self._kept, scored=scored))

    def _give_up(self, seat: _Seat, failure: Failure) -> None:
        """Go on without it, if there are others that would fare better."""
        import ray

        if failure.is_of_the_job and not any(one.engine for one in self._seats):
            self._broken = JobError(failure.message)
            return
        self._leases.give_up(seat.number)
        seat.state, seat.in_flight = "given up", 0
        ray.kill(seat.actor)  # else it would keep its GPUs from those that wait for a place
        if self._leases.holders:
            self._listener.engine_event(f"worker {seat.number} is given up: {failure.message}")
        elif len(self._seats) == 1:
            self._broken = EngineError(failure.message)
        else:
            told = f"all {len(self._seats)} workers failed; the last: {failure.message}"
            self._broken = EngineError(told)

    def _watch(self) -> None:
        """A worker that does not answer a call is ended, and so restarted; one that has no place
        yet is spoken of once."""
        import ray

        now = time.monotonic()
        for seat in self._seats:
            if seat.number not in self._leases.holders:
                continue
            silent_s = now - seat.called_at
            if seat.place is None:
                if now - seat.waits_since >= PLACE_S and not seat.told_to_wait:
                    seat.told_to_wait = True
                    self._listener.event(
                        f"worker {seat.number} waits for a place: it needs {_shown_needs(self._job)}"
                    )
            elif seat.call is not None and silent_s >= self._job.run.stall_timeout_s:
                seat.called_at = now
                self._listener.engine_event(
                    f"worker {seat.number} is silent for {silent_s:.0f} s"
                    f" (run.stall_timeout_s = {self._job.run.stall_timeout_s:g}): restarted"
                )
                ray.kill(seat.actor, no_restart=False)

    def _told(self, seat: _Seat) -> dict[str, Any]:
        holder = self._leases.holders.get(seat.number)
        return {
            "worker": seat.number,
            "state": seat.state,
            "node": None if seat.place is None else seat.place.node,
            "gpus": [] if seat.place is None else list(seat.place.gpus),
            "rows": seat.rows,
            "rows_per_s": 0.0 if holder is None else round(holder.rate, 3),
            "in_flight": seat.in_flight,
            "restarts": seat.deaths,
            "engine_restarts": seat.engine_restarts + seat.engine_restarts_before,
        }


@contextmanager
def _session(job: JobConfig) -> Iterator[None]:
    """Ray, as long as this lasts: the one that the program has begun, a cluster's, or one of our own.

    Raises:
        JobError: not installed, nobody at the address, or too small a machine.
    """
    try:
        import ray
    except ImportError:
        raise JobError(
            "run.workers: Ray is not installed; pip install 'batchkit[ray]', or leave workers out"
        ) from None
    if ray.is_initialized():
        yield
        return
    address = job.run.ray_address or os.environ.get("RAY_ADDRESS")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with tempfile.TemporaryDirectory(prefix="batchkit-ray-", ignore_cleanup_errors=True) as scratch:
        try:
            _join(job, address, scratch)
            yield
        finally:
            ray.shutdown()


def _join(job: JobConfig, address: str | None, scratch: str) -> None:
    """Join Ray at ``address``, or begin one whose files are in ``scratch``."""
    import ray

    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        if address:
            _knock(address)
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
        else:
            _begin_local(job, scratch)
    except SystemExit as error:  # what Ray's own handler of SIGTERM makes of one meanwhile
        raise Interrupted(signal.SIGTERM) from error
    except (OSError, ValueError, RuntimeError) as error:
        raise JobError(
            f"run.workers: can't join Ray at {address} ({_shortened(error)}); give the address that"
            " `ray start --head` printed, or none to begin Ray on this machine"
            if address
            else f"run.workers: Ray can't be started here: {_shortened(error)}"
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)


def _knock(address: str) -> None:
    """Raises OSError where nobody is at ``host:port``: Ray itself would wait there for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()


def _begin_local(job: JobConfig, scratch: str) -> None:
    """Ray on this machine, for this run alone: heard on 127.0.0.1, gone with it."""
    import ray

    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # what makes it 127.0.0.1
    os.environ.setdefault("RAY_AUTH_TOKEN", uuid4().hex)  # else one is left in the home folder
    workers, run = job.run.workers or 1, job.run
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, math.ceil(workers * (run.worker_cpus or 1))),
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        logging_level=logging.ERROR,
        log_to_driver=False,
        _temp_dir=scratch,
    )
    gpus, here = needs(job)["num_gpus"], ray.cluster_resources().get("GPU", 0)
    if gpus * workers > here:
        raise JobError(
            f"run.workers = {workers} need {gpus * workers:g} GPUs, {gpus:g} each; this machine has"
            f" {here:g}. Ask for fewer, set run.worker_gpus, or join a cluster (run.ray_address)"
        )


def needs(job: JobConfig) -> dict[str, float]:
    """What a worker is to have for itself, as Ray names it.

    Left to us, GPUs are those that the engine asks for, where there are any at all; without one, the
    cores are shared out, and Ray gives each worker as many OpenMP threads.
    """
    import ray

    options, n_workers = job.engine.options, job.run.workers or 1
    gpus: float | None = job.run.worker_gpus
    if gpus is None:
        group = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
        has_model = job.engine.kind not in LIGHT
        gpus = group if has_model and ray.cluster_resources().get("GPU", 0) else 0
    cpus: float | None = job.run.worker_cpus
    if cpus is None:
        nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
        fair = range(sum(nodes) // n_workers if not gpus else 1, 1, -1)
        cpus = next((n for n in fair if sum(cpu // n for cpu in nodes) >= n_workers), 1)
    return {"num_cpus": cpus, "num_gpus": gpus}


def _wait(calls: Sequence[Any], n: int, timeout_s: float) -> list[Any]:
    """Those of ``calls`` that have ended, once ``n`` of them have or the time is over.

    Raises:
        Interrupted: as itself, and not as the SystemError that Ray's compiled code makes of it.
    """
    import ray

    try:
        return list(ray.wait(calls, num_returns=n, timeout=timeout_s)[0])
    except SystemError as error:
        if isinstance(error.__cause__, Interrupted):
            raise error.__cause__ from None
        raise


def _shown_needs(job: JobConfig) -> str:
    told = needs(job)
    return f"{told['num_cpus']:g} CPUs and {told['num_gpus']:g} GPUs on one node"


def _engine_log(folder: Path, number: int) -> Path:
    """Beside the results where this machine sees them, else among its temporary files."""
    path = Path(LOG)
    home = folder if folder.is_dir() else Path(tempfile.gettempdir()) / f"batchkit-{folder.name}"
    return home / f"{path.stem}.worker-{number}{path.suffix}"


def _at(place: Place | None) -> str:
    if place is None:
        return ""
    gpus = f", GPU {', '.join(map(str, place.gpus))}" if place.gpus else ""
    return f" on {place.node}{gpus}"


def _shortened(error: Exception) -> str:
    """Ray's messages are pages: the first of it."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]
