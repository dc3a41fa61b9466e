"""The worker's side: a Worker on its own thread, in a process that Ray starts.

A call to ``exchange`` delivers rows and returns records. It is always short, because it is also the
worker's heartbeat. Rows travel as they were read; what they name (images, texts) is opened here.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from batchkit.engines.process.launcher import LOG
from batchkit.errors import BatchkitError, JobError
from batchkit.execution.events import EngineHistory, EngineLine, Event, Found, Line, Note, PoolLoad
from batchkit.execution.kept_engine import KeptEngine
from batchkit.execution.lane import POLL_S, Opening
from batchkit.execution.requests import requests_of
from batchkit.execution.start import Start
from batchkit.execution.turns import grouping_of
from batchkit.execution.worker import EngineFacts, Returned, Worker
from batchkit.storage.ledger import RecordLine
from batchkit.storage.steps import GenerationLine
from batchkit.types import Task

GATHER_S = 0.1  # records finished within it are returned together
HEARTBEAT_S = 0.5  # without records or events, a call returns after it
MOST_CALLS_PER_S = 200.0  # of all workers together: a call takes the driver about 1 ms
CLOSE_S = 30.0
_REPORTED = ("index", "status", "usage", "earlier_usage", "error")  # what the run counts


class Place(NamedTuple):
    """Where a worker runs."""

    node: str
    gpus: Sequence[int | str]


class WorkerFailure(NamedTuple):
    """Why a worker can't continue. ``is_of_the_job``: no other worker could either."""

    message: str
    is_of_the_job: bool


class Load(NamedTuple):
    """``in_flight``: rows that its engine works on. ``capacity``: rows it can use at a time.
    ``unfinished_tokens``: of the answers that have not ended. ``engine``: what its engine does."""

    in_flight: int
    retried: int
    capacity: int
    unfinished_tokens: int
    engine: PoolLoad = PoolLoad()


IDLE = Load(0, 0, 0, 0)


class Report(NamedTuple):
    """A worker's answer to a call; ``histories`` are the newest ones by engine, ``events`` are the others."""

    lines: Sequence[Returned]
    events: Sequence[Line | EngineLine | Note | Found]
    histories: Mapping[str, EngineHistory]
    engine: EngineFacts | None
    failure: WorkerFailure | None
    load: Load


class Actor:
    """One worker's process. Ray calls it from one thread, one call at a time."""

    def __init__(
        self,
        number: int,
        start: Start,
        engines: Sequence[str],
        import_from: Sequence[str] = (),
    ) -> None:
        job = start.job
        if job.rollout is not None:  # its module may be in a folder that only the run looks in
            sys.path += [place for place in import_from if place not in sys.path]
        self._number, self._start, self._engines = number, start, engines
        self._inbox: SimpleQueue[Task | None] = SimpleQueue()
        spacing_s = (job.run.workers or 1) / MOST_CALLS_PER_S
        self._gather_s, self._heartbeat_s = max(GATHER_S, spacing_s), max(HEARTBEAT_S, spacing_s)
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._taking = True
        self._closed = False
        self._unsettled = self._written = 0
        self._lines: list[Returned] = []
        self._events: list[Line | EngineLine | Note | Found] = []
        self._histories: dict[str, EngineHistory] = {}
        self._engine: EngineFacts | None = None
        self._failure: WorkerFailure | None = None
        self._load = IDLE

    def begin(self, known: Mapping[str, EngineHistory]) -> Place:
        """Load the models, on its own thread."""
        import ray

        if self._thread is not None:  # the run takes this worker for dead, so end it
            os._exit(1)
        self._thread = threading.Thread(target=self._work, args=(known,), name="worker")
        self._thread.daemon = True
        self._thread.start()
        return Place(socket.gethostname(), ray.get_gpu_ids())

    def exchange(self, tasks: Sequence[Task], taking: bool, written: int) -> Report:
        """Take ``tasks``; return what has been settled since, after a wait for it.

        ``written``: how many further generations that were returned are in the ledger now.

        Raises:
            RuntimeError: Ray has restarted this process since ``begin`` and the run did not notice.
        """
        if self._thread is None:
            raise RuntimeError("its process is a new one")
        self._taking = taking
        for task in tasks:
            self._inbox.put(task)
        with self._changed:
            self._written += written
            self._unsettled += len(tasks)
            self._changed.wait_for(
                lambda: self._lines or self._events or self._failure, self._heartbeat_s
            )
            if self._lines:
                enough = self._unsettled // 2
                self._changed.wait_for(
                    lambda: len(self._lines) >= enough or self._failure, self._gather_s
                )
            lines, self._lines = self._lines, []
            events, self._events = self._events, []
            self._unsettled -= sum(not isinstance(line, GenerationLine) for line in lines)
            return Report(
                lines, events, {**self._histories}, self._engine, self._failure, self._load
            )

    def close(self) -> None:
        """Drop what is in flight and release the GPU."""
        self._closed = True
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _work(self, known: Mapping[str, EngineHistory]) -> None:
        try:
            tasks = iter(self._inbox.get, None)
            with ExitStack() as held:
                requests = requests_of(self._start, tasks, self._engines, may_wait=True)
                held.enter_context(closing(requests))
                held.callback(self._inbox.put, None)  # the rendering threads wait for rows
                log = _engine_log(self._start.job.folder, self._number)
                engines = held.enter_context(closing(KeptEngine(log)))
                environments = grouping_of(self._start.job).environments
                opening = Opening(self._hear, engines, known, environments=environments)
                worker = Worker(self._start, requests, self._engines, opening)
                held.enter_context(closing(worker))
                self._answer(worker)
        except BatchkitError as error:
            self._fail(WorkerFailure(str(error), isinstance(error, JobError)))
        except BaseException:
            self._fail(WorkerFailure(traceback.format_exc(), is_of_the_job=False))

    def _answer(self, worker: Worker) -> None:
        with self._changed:
            self._engine = worker.engine_facts
        while not self._closed:
            taking = self._taking
            self._bring(worker, worker.fill(taking=taking))
            self._bring(worker, worker.poll())
            with self._changed:
                written, self._written = self._written, 0
            worker.written(written)
            if not taking and not worker.in_flight:
                time.sleep(POLL_S)

    def _bring(self, worker: Worker, lines: Sequence[Returned]) -> None:
        with self._changed:
            self._load = Load(
                worker.in_flight,
                worker.retried,
                worker.capacity,
                worker.unfinished_tokens,
                worker.load,
            )
            for line in lines:
                self._lines.append(_brief(line))
            if lines:
                self._changed.notify_all()

    def _hear(self, event: Event) -> None:
        with self._changed:
            if isinstance(event, EngineHistory):
                self._histories[event.engine] = event
            else:
                self._events.append(event)
                self._changed.notify_all()

    def _fail(self, failure: WorkerFailure) -> None:
        with self._changed:
            self._failure = failure
            self._changed.notify_all()


def _brief(line: Returned) -> Returned:
    """``line`` with no more of its table than the run reads: the rest is in its bytes."""
    if isinstance(line, RecordLine):
        reported = {name: line.record.get(name) for name in _REPORTED}
        return RecordLine(line.raw, reported, line.vector)
    if isinstance(line, GenerationLine):
        return GenerationLine(line.raw, {name: line.generation.get(name) for name in _REPORTED})
    return line


def _engine_log(folder: Path, number: int) -> Path:
    """In the run folder if this machine sees it, else in its temporary folder."""
    own = Path(tempfile.gettempdir(), f"batchkit-{os.getuid()}", folder.name)
    log = Path(LOG)
    return (folder if folder.is_dir() else own) / f"{log.stem}.worker-{number}{log.suffix}"
