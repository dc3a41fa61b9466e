"""The workers as the run sees them, and which rows each of them gets.

A row is handed out as a lease: the worker holds it until its record comes back, or until the worker
dies; then it is handed out again. A worker holds as many rows as its engine can use, so a slow one
gets fewer. Near the end of the input each gets its share of what is left, in proportion to what it
has answered, down to single rows: so all of them end at about the same time. Rows that begin alike go
to the same worker, whose engine has their beginning in its cache.

What a worker held when it died is replayed in halves (``bisection.py``), by the first worker that
has nothing else to do. So a row that kills workers is found, and the others are answered.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchkit.execution.bisection import Suspects
from batchkit.execution.cluster.actor import Place
from batchkit.execution.events import EngineHistory, Load
from batchkit.execution.worker import EngineFacts
from batchkit.storage.manifest import WorkerState
from batchkit.types import Task

MOST_IN_A_LEASE = 256
MOST_TO_END_A_GROUP = 64  # of a longer one another worker gets the next rows


class Leases:
    """``workers`` are those that may get rows, by number.

    ``quarantined``: indices of rows that killed an engine or a worker before; each goes out alone.
    """

    def __init__(self, workers: Sequence[RayWorker], *, quarantined: Collection[int] = ()) -> None:
        self._quarantined = quarantined
        self.workers = {worker.number: worker for worker in workers}
        self._suspects = Suspects[Task]()
        self._replaying: int | None = None  # the worker that holds suspects, and nothing else
        self._next: Task | None = None  # read, and handed to nobody yet

    @property
    def n_held(self) -> int:
        """Rows that workers hold, or that are the next one's."""
        return sum(len(worker.held) for worker in self.workers.values()) + bool(self._next)

    @property
    def are_settled(self) -> bool:
        """True if no worker holds a row and none waits for replay."""
        return not (self.n_held or self._suspects)

    def die(self, number: int, cause: str) -> Task | None:
        """This worker died: what it held is to be replayed. Returns the row at fault, once that is proven."""
        worker = self.workers[number]
        worker.capacity = 0
        worker.deaths_in_a_row += 1
        held, worker.held = list(worker.held.values()), {}
        if held and number == self._replaying:
            return self._suspects.died(held, cause)
        if held:
            self._suspects.interpose(held)
        return None

    def give_up(self, number: int) -> None:
        """This worker gets no more rows; another replays what it held, which is not at fault."""
        worker = self.workers.pop(number)
        worker.is_given_up = True
        if worker.held:
            self._suspects.interpose(list(worker.held.values()))

    def lease(
        self, number: int, left: int | None, next_task: Callable[[], Task | None]
    ) -> Sequence[Task]:
        """The rows that this worker gets now: suspects alone, else as many new rows as it may have.

        ``next_task`` gives the next row, or None if there is none now; ``left`` is how many are
        still to come, or None if that is unknown.
        """
        worker = self.workers[number]
        if number == self._replaying and worker.held:
            return ()
        tasks = self._suspected(number)
        if not tasks:
            new = self._new(worker, left, next_task)
            for task in new:
                if task.row.index in self._quarantined:
                    self._suspects.suspect(task)
            tasks = [task for task in new if task.row.index not in self._quarantined]
        if not tasks:
            tasks = self._suspected(number)
        worker.held |= {task.row.index: task for task in tasks}
        return tasks

    def _suspected(self, number: int) -> Sequence[Task]:
        """The suspects that this worker is to replay now: it must hold no row, and no other any suspects."""
        worker = self.workers[number]
        if not self._suspects or worker.held or not worker.capacity:
            return ()
        if self._replaying in self.workers and self.workers[self._replaying].held:
            return ()
        group = self._suspects.next_group()
        self._replaying = number if group else None
        return group

    def _new(
        self, worker: RayWorker, left: int | None, next_task: Callable[[], Task | None]
    ) -> list[Task]:
        """As many rows as it has room for, and those that begin like the last of them."""
        room = worker.capacity - len(worker.held)
        n = min(room, MOST_IN_A_LEASE, self._share(worker, left) - len(worker.held))
        most = n + MOST_TO_END_A_GROUP if n == room else n
        tasks: list[Task] = []
        while len(tasks) < n or (tasks and tasks[-1].group and len(tasks) < most):
            if (task := self._next or next_task()) is None:
                break
            if len(tasks) >= n and task.group != tasks[-1].group:
                self._next = task
                break
            self._next = None
            tasks.append(task)
        return tasks

    def _share(self, worker: RayWorker, left: int | None) -> int:
        """Of the rows that are held or still to come, in proportion to what it has answered."""
        if left is None or not worker.capacity:
            return worker.capacity
        answered = sum(one.settled + 1 for one in self.workers.values() if one.capacity)
        share = math.ceil((left + self.n_held) * (worker.settled + 1) / answered)
        if not worker.settled:  # it may be slow: at first only what its engine runs at once
            share = min(share, worker.capacity // 2)
        return max(1, share)


@dataclass
class Life:
    """One process of a worker: from its wait for a place to its death. ``call`` is the pending one.
    ``histories``: of its engines, by name, with the state of its own search for a poison row.
    ``returned``: generations that are not in the ledger yet; ``written``: those that are, which the worker
    does not know yet.
    """

    actor: Any
    histories: Mapping[str, EngineHistory]
    began_at: float = field(default_factory=time.monotonic)
    call: Any = None
    called_at: float = 0.0
    place: Place | None = None
    engine: EngineFacts | None = None
    load: Load = field(default_factory=Load)
    is_said_to_wait: bool = False
    returned: int = 0
    written: int = 0

    @property
    def engine_restarts(self) -> int:
        return sum(history.restarts for history in self.histories.values())

    @property
    def where(self) -> str:
        """For a message, for example `` on node-3, GPU 0, 1``; empty if it has no place yet."""
        if self.place is None:
            return ""
        gpus = f", GPU {', '.join(map(str, self.place.gpus))}" if self.place.gpus else ""
        return f" on {self.place.node}{gpus}"


class RayWorker:
    """A worker over all its lives, and the rows that it has ``held`` since the last one began.

    ``capacity``: rows that it can use at a time; 0 while its model loads. ``settled``: how many came back,
    ``rows`` of them with a record. ``up_since``: when its engine was loaded for the first time.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.capacity = self.settled = self.rows = self.deaths_in_a_row = 0
        self.held: dict[int, Task] = {}
        self.lives: list[Life] = []
        self.is_given_up = False
        self.up_since: float | None = None

    def settle(self, indices: Collection[int]) -> list[Task]:
        """Remove the rows with these indices, which came back, and return them."""
        settled = [self.held.pop(index) for index in indices]
        self.settled += len(settled)
        if settled:
            self.deaths_in_a_row = 0
        return settled

    def begin(self, actor: Any, known: Mapping[str, EngineHistory]) -> None:
        """Its next life."""
        histories = {name: learned._replace(restarts=0) for name, learned in known.items()}
        self.lives.append(Life(actor, histories))

    @property
    def life(self) -> Life:
        return self.lives[-1]

    @property
    def retried(self) -> int:
        return sum(life.load.retried for life in self.lives)

    def noted(self) -> WorkerState:
        """As it is noted in the manifest."""
        life, place, since = self.life, self.life.place, self.up_since
        state = "loading" if life.engine is None else "working"
        if self.is_given_up:
            state = "given up"
        elif place is None:
            state = "waiting for a place"
        return WorkerState(
            worker=self.number,
            state=state,
            node=None if place is None else place.node,
            gpus=[] if place is None else list(place.gpus),
            rows=self.rows,
            rows_per_s=0.0 if since is None else round(self.rows / (time.monotonic() - since), 3),
            in_flight=0 if self.is_given_up else life.load.in_flight,
            restarts=len(self.lives) - 1,
            engine_restarts=sum(life.engine_restarts for life in self.lives),
        )
