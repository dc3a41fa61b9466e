"""The code of a worker's process, which Ray starts: a Worker on a separate thread.

The run calls ``exchange`` to send rows and get records. The call is always short, because it is also the worker's
heartbeat. Rows are sent as they were read; this process opens the images and texts that they name.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from msgspec import structs

from batchkit.engines import mps
from batchkit.engines.process.launcher import LOG
from batchkit.errors import BatchkitError, EngineError, JobError, WrongAnswersError
from batchkit.execution.deduplicate import Answers
from batchkit.execution.engine_pool import EnginePool, RunEngines
from batchkit.execution.engine_turns import grouping_of
from batchkit.execution.events import EngineHistory, Event, Load
from batchkit.execution.lane import POLL_S
from batchkit.execution.places import places_of
from batchkit.execution.requests import requests_of
from batchkit.execution.start import Start
from batchkit.execution.worker import EngineFacts, Returned, Worker
from batchkit.storage.ledger import RecordLine
from batchkit.storage.runfolder import is_run
from batchkit.storage.steps import GenerationLine
from batchkit.types import Counted, Task

GATHER_S = 0.1  # records finished within this time are returned together
HEARTBEAT_S = 0.5  # without records or events, a call returns after this time
MOST_CALLS_PER_S = 200.0  # over all workers, since each call costs the driver about 1 ms
CLOSE_S = 30.0


class Placement(NamedTuple):
    """The node and GPUs of a worker. ``node_id`` is Ray's id of the node."""

    node: str
    gpus: Sequence[int | str]
    node_id: str


@dataclass
class WorkerReport:
    """The result of a call of ``exchange``: ``lines`` and ``events`` since the last call.

    - ``engine``: facts about the loaded engines; None while the models load.
    - ``failure``: why the worker can't continue. It is a JobError if every other worker would fail, too.
    - ``is_checked``: True once the self-check at the end of the run has ended.
    """

    place: Placement
    lines: list[Returned] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    engine: EngineFacts | None = None
    failure: BatchkitError | None = None
    load: Load = field(default_factory=Load)
    is_checked: bool = False


class Actor:
    """The process of one worker. The constructor starts to load the models. Ray calls the methods from one thread.

    ``known``: histories of earlier workers' engines, by engine name.
    """

    def __init__(
        self,
        number: int,
        start: Start,
        engines: Sequence[str],
        known: Mapping[str, EngineHistory],
        import_from: Sequence[str],
    ) -> None:
        import ray

        # The module of the rollout's function may be found only through the run's sys.path.
        if start.job.rollout is not None:
            sys.path += [place for place in import_from if place not in sys.path]
        self._number, self._start, self._engines = number, start, engines
        self._inbox: SimpleQueue[Task | None] = SimpleQueue()
        self._changed = threading.Condition()
        node_id = ray.get_runtime_context().get_node_id()
        self._report = WorkerReport(Placement(socket.gethostname(), ray.get_gpu_ids(), node_id))
        self._taking, self._asks_for_check = True, False
        self._closed = False
        self._unsettled = self._written = 0
        self._thread = threading.Thread(target=self._work, args=(known,), name="worker")
        self._thread.daemon = True
        self._thread.start()

    def exchange(
        self, tasks: Sequence[Task], taking: bool, written: int, check: bool, n_workers: int
    ) -> WorkerReport:
        """Take new ``tasks``, wait for settled rows, and return the rows that were settled since the last call.

        - ``taking``: False while the run is stopping or this node drains, so that no request is submitted.
        - ``written``: how many returned generations the run has written to the ledger since the last call.
        - ``check``: True once all rows of the run are settled, so that the self-check at its end can begin.
        - ``n_workers``: the number of workers, which share ``MOST_CALLS_PER_S``.
        """
        self._taking, self._asks_for_check = taking, check
        spacing_s = n_workers / MOST_CALLS_PER_S
        for task in tasks:
            self._inbox.put(task)
        with self._changed:
            self._written += written
            self._unsettled += len(tasks)
            now = self._report
            self._changed.wait_for(
                lambda: now.lines or now.events or now.failure, max(HEARTBEAT_S, spacing_s)
            )
            if now.lines:
                enough = self._unsettled // 2
                self._changed.wait_for(
                    lambda: len(now.lines) >= enough or now.failure, max(GATHER_S, spacing_s)
                )
            self._report = replace(now, lines=[], events=[])
            self._unsettled -= sum(not isinstance(line, GenerationLine) for line in now.lines)
            return now

    def close(self) -> None:
        """Drop requests in flight and release the GPU."""
        self._closed = True
        self._thread.join(CLOSE_S)

    def _work(self, known: Mapping[str, EngineHistory]) -> None:
        try:
            tasks = iter(self._inbox.get, None)
            mps.remove_orphans()
            with ExitStack() as held:
                held.callback(mps.stop)
                requests = requests_of(self._start, tasks, self._engines, may_wait=True)
                held.enter_context(closing(requests))
                # Ends the threads that wait for rows to render.
                held.callback(self._inbox.put, None)
                log = _engine_log(self._start.job.folder, self._number)
                engines = held.enter_context(closing(EnginePool(log)))
                job = self._start.job
                places = places_of(job, self._engines, grouping_of(job).environments)
                opened = RunEngines(self._start, engines, places, self._hear, known=known)
                reused = [Path(name) for name in job.run.reuse if is_run(Path(name))]
                answers = held.enter_context(closing(Answers(self._start, reused=reused)))
                # Only the driver knows how many rows there are, so the check near the start waits until the run has
                # lasted long enough.
                worker = Worker(self._start, requests, opened, answers, expected_s=lambda: 0.0)
                held.enter_context(closing(worker))
                self._answer(worker)
        except JobError as error:
            self._fail(JobError(str(error)))
        except WrongAnswersError as error:
            self._fail(error)
        except BatchkitError as error:
            self._fail(EngineError(str(error)))
        except BaseException:
            self._fail(EngineError(traceback.format_exc()))

    def _answer(self, worker: Worker) -> None:
        with self._changed:
            self._report.engine = worker.engine_facts
        has_begun_check = False
        while not self._closed:
            taking = self._taking
            self._bring(worker, worker.fill(taking=taking))
            self._bring(worker, worker.poll())
            with self._changed:
                written, self._written = self._written, 0
            worker.note_written(written)
            if self._asks_for_check:
                if not has_begun_check:
                    worker.check()
                    has_begun_check = True
                self._report.is_checked = not worker.is_checking
            if not taking and not worker.load.in_flight:
                time.sleep(POLL_S)

    def _bring(self, worker: Worker, lines: Sequence[Returned]) -> None:
        with self._changed:
            self._report.load = worker.load
            self._report.lines += map(_brief, lines)
            if lines:
                self._changed.notify_all()

    def _hear(self, event: Event) -> None:
        with self._changed:
            self._report.events.append(event)
            self._changed.notify_all()

    def _fail(self, failure: BatchkitError) -> None:
        with self._changed:
            self._report.failure = failure
            self._changed.notify_all()


def _brief(line: Returned) -> Returned:
    """Return ``line`` without decoded fields that the run does not read, to send fewer bytes. The encoded line has
    them."""
    if isinstance(line, RecordLine):
        counted = {name: getattr(line.record, name) for name in Counted.__struct_fields__}
        return line._replace(record=Counted(**counted))
    if isinstance(line, GenerationLine):
        answer = dict.fromkeys(("text", "reasoning", "tool_calls", "choices"))
        return line._replace(generation=structs.replace(line.generation, **answer))
    return line


def _engine_log(folder: Path, number: int) -> Path:
    """Return the path of the engine's log. It is in the run folder if this machine has it, otherwise in a temporary
    folder."""
    own = Path(tempfile.gettempdir(), f"batchkit-{os.getuid()}", folder.name)
    log = Path(LOG)
    return (folder if folder.is_dir() else own) / f"{log.stem}.worker-{number}{log.suffix}"
