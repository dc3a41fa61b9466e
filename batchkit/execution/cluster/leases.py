"""Leases: which rows each worker on Ray holds, and which rows it gets next.

A worker holds a row until it returns the row's record. If the worker dies, another worker gets the row. The number of
rows that a worker holds depends on its engine, so a slow worker gets fewer rows.

- Near the end of the input, the expected tokens of the remaining rows are divided among the workers, in proportion to the
  tokens that each has answered, down to single rows. So all workers end at about the same time.
- Rows with the same prefix go to the same worker, whose engine has the prefix in its cache.
- Rows that a worker held when it died are suspects. The first worker that holds no other row replays them in halves
  (``bisection.py``). So a row that kills workers is found, and the other rows are answered.
- With ``workers.count = "auto"``, workers join and leave. Rows of a worker whose node was lost or drains are no suspects:
  the next worker that asks for rows gets them.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchkit.execution.bisection import Suspects
from batchkit.execution.cluster.actor import Placement
from batchkit.execution.events import EngineHistory, Load
from batchkit.execution.worker import EngineFacts
from batchkit.storage.starts import WorkerState
from batchkit.types import Task, utc_now

MOST_IN_A_LEASE = 256
MOST_TO_END_A_GROUP = 64  # the rest of a longer group may go to another worker
MOST_LOSSES = 2  # a row that was on more lost nodes is a suspect


class Leases:
    """The rows that each worker holds.

    - ``quarantined``: indexes of rows that killed an engine or a worker in an earlier start; each is given out alone.
    - ``workers`` (attribute): the workers that may get rows, by number.
    """

    def __init__(self, quarantined: Collection[int] = ()) -> None:
        self._quarantined = quarantined
        self.workers: dict[int, RayWorker] = {}
        self._suspects = Suspects[Task]()
        self._replaying: int | None = None  # the worker that holds suspects, and nothing else
        self._next = deque[Task]()  # to hand out before further rows are read
        self._n_given, self._tokens_given = 0, 0.0  # rows that were handed out, and their tokens
        self._losses = Counter[int]()  # by row: how many nodes were lost while the row was on them

    @property
    def n_held(self) -> int:
        """The number of rows that workers hold, and of rows that were read but no worker holds."""
        return sum(len(worker.held) for worker in self.workers.values()) + len(self._next)

    @property
    def is_done(self) -> bool:
        """True if no worker holds a row and none waits for replay."""
        return not (self.n_held or self._suspects)

    def die(self, number: int, cause: str) -> Task | None:
        """Record that a worker died: its rows will be replayed. Return the poison row if this death proves one."""
        worker = self.workers[number]
        worker.capacity = 0
        worker.deaths_in_a_row += 1
        held, worker.held = list(worker.held.values()), {}
        if held and number == self._replaying:
            return self._suspects.record_death(held, cause)
        if held:
            self._suspects.interpose(held)
        return None

    def give_up(self, number: int) -> None:
        """Remove a worker without suspecting its rows. Another worker gets them."""
        worker = self.workers.pop(number)
        if worker.held:
            self._suspects.interpose(list(worker.held.values()))

    def lose(self, number: int, cause: str) -> Task | None:
        """Remove a worker because its node was lost. Its rows are handed out next. Return the poison row if this loss
        proves one."""
        worker = self.workers[number]
        self._losses.update(worker.held.keys())  # of a dict, it would add the values
        is_suspect = any(self._losses[index] > MOST_LOSSES for index in worker.held)
        poison = self.die(number, cause) if is_suspect or number == self._replaying else None
        self.leave(number)
        return poison

    def leave(self, number: int) -> None:
        """Remove a worker that ends without a fault. Its rows are handed out next."""
        worker = self.workers.pop(number)
        self._next.extendleft(reversed(worker.held.values()))
        worker.held = {}

    def lease(
        self, number: int, left: int | None, next_task: Callable[[], Task | None]
    ) -> Sequence[Task]:
        """Return the rows to give to this worker now: a group of suspects to replay, otherwise new rows.

        - ``left``: number of rows that were not given out yet; None if unknown.
        - ``next_task``: returns the next row; None if no row can be read at this moment.
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
        """Return suspects for this worker to replay. Empty if this worker holds a row, or another worker holds
        suspects."""
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
        """Return new rows up to the worker's capacity, and further rows with the same prefix as the last one."""
        room = worker.capacity - len(worker.held)
        n = min(room, MOST_IN_A_LEASE)
        most = n + MOST_TO_END_A_GROUP if n == room else n
        tasks: list[Task] = []
        if not self._next and (first := next_task()) is not None:  # it shows what rows cost
            self._next.append(first)
            left = None if left is None else left - 1
        tokens = self._share(worker, left) - worker.tokens_held
        while tokens > 0 and (len(tasks) < n or (tasks and tasks[-1].group and len(tasks) < most)):
            if (task := self._next.popleft() if self._next else next_task()) is None:
                break
            if len(tasks) >= n and task.group != tasks[-1].group:
                self._next.appendleft(task)
                break
            tasks.append(task)
            tokens -= task.tokens
        self._n_given += len(tasks)
        self._tokens_given += sum(task.tokens for task in tasks)
        return tasks

    def _share(self, worker: RayWorker, left: int | None) -> float:
        """Return how many expected tokens this worker may hold near the end of the input, in proportion to the
        expected tokens of the rows that it has answered."""
        if left is None or not worker.capacity:
            return math.inf
        workers = [one for one in self.workers.values() if one.capacity]
        read = sum(task.tokens for task in self._next)
        mean = self._tokens_given / self._n_given if self._n_given else read or 1.0
        answered = sum(one.tokens_given_back + mean for one in workers)
        unfinished = left * mean + read + sum(one.tokens_held for one in self.workers.values())
        share = unfinished * (worker.tokens_given_back + mean) / answered
        # A new worker may be slow, so start with the number of rows that its engine runs at the same time.
        return share if worker.given_back else min(share, worker.capacity // 2 * mean)


@dataclass
class Life:
    """One process of a worker: from waiting for resources to its death."""

    actor: Any
    histories: Mapping[tuple[str, int], EngineHistory]  # of its engines, by name and number
    began_at: float = field(default_factory=time.monotonic)
    call: Any = None  # the pending call
    called_at: float = 0.0
    place: Placement | None = None
    engine: EngineFacts | None = None
    load: Load = field(default_factory=Load)
    is_said_to_wait: bool = False
    is_checked: bool = False  # the self-check at the end of the run has ended
    returned: int = 0  # generations that came back and are not in the ledger yet
    written: int = 0  # generations in the ledger that the next call reports to the worker

    @property
    def engine_restarts(self) -> int:
        return sum(history.restarts for history in self.histories.values())

    def kill(self) -> None:
        """End the process immediately. Its pending call fails."""
        import ray

        ray.kill(self.actor)

    def histories_of(self, name: str) -> list[EngineHistory]:
        """Return the histories of the engines called ``name``: several with ``workers.per_gpu``."""
        return [history for (its, _), history in self.histories.items() if its == name]

    @property
    def where(self) -> str:
        """The worker's node and GPUs for a message: `` on node-3, GPU 0, 1``; "" while it waits for resources."""
        if self.place is None:
            return ""
        gpus = f", GPU {', '.join(map(str, self.place.gpus))}" if self.place.gpus else ""
        return f" on {self.place.node}{gpus}"


class RayWorker:
    """A worker, which may be restarted as another process, and the rows that its newest process holds.

    - ``lives``: all processes of the worker so far.
    - ``capacity``: how many rows it may hold; 0 while its model loads.
    - ``given_back``: how many rows it has returned, as a record or paused. ``rows``: how many of them as a record.
    - ``up_since``: when its engine was first loaded (``time.monotonic()``); None before. ``up_until``: when it left.
    - ``joined_at``, ``left_at``: see ``WorkerState``. ``why_left``: its last state, for example ``node lost``.
    - ``is_draining``: its node has a notice, so it gets no more rows.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.capacity = self.given_back = self.rows = self.deaths_in_a_row = 0
        self.tokens_given_back = 0.0
        self.held: dict[int, Task] = {}
        self.lives: list[Life] = []
        self.is_draining = False
        self.up_since: float | None = None
        self.up_until: float | None = None
        self.joined_at: str | None = None
        self.left_at: str | None = None
        self.why_left = ""

    def give_back(self, indices: Collection[int]) -> list[Task]:
        """Remove the rows with these indexes from ``held``, because the worker has returned them. Return their
        tasks."""
        tasks = [self.held.pop(index) for index in indices]
        self.given_back += len(tasks)
        self.tokens_given_back += sum(task.tokens for task in tasks)
        if tasks:
            self.deaths_in_a_row = 0
        return tasks

    @property
    def tokens_held(self) -> float:
        return sum(task.tokens for task in self.held.values())

    def begin(self, actor: Any, known: Mapping[str, EngineHistory]) -> None:
        histories = {(name, 0): learned._replace(restarts=0) for name, learned in known.items()}
        self.lives.append(Life(actor, histories))

    def leave(self, why: str) -> None:
        """End the worker for good, also if its process still works."""
        self.left_at, self.up_until, self.why_left = utc_now(), time.monotonic(), why
        self.life.call = None  # otherwise its end would count as another death
        self.life.kill()  # otherwise it would hold GPUs that waiting workers need

    @property
    def life(self) -> Life:
        return self.lives[-1]

    @property
    def has_place(self) -> bool:
        """True once Ray has given resources to the worker's newest process."""
        return self.life.place is not None

    @property
    def retried(self) -> int:
        return sum(life.load.retried for life in self.lives)

    def noted(self) -> WorkerState:
        """Return the worker's state for the note of the start."""
        life, place, since = self.life, self.life.place, self.up_since
        state = "loading" if life.engine is None else "working"
        if self.left_at is not None:
            state = self.why_left
        elif place is None:
            state = "waiting for resources"
        elif self.is_draining:
            state = "draining"
        until = self.up_until or time.monotonic()
        return WorkerState(
            worker=self.number,
            state=state,
            node=None if place is None else place.node,
            gpus=[] if place is None else list(place.gpus),
            rows=self.rows,
            rows_per_s=0.0 if since is None else round(self.rows / (until - since), 3),
            in_flight=0 if self.left_at else life.load.in_flight,
            restarts=len(self.lives) - 1,
            engine_restarts=sum(life.engine_restarts for life in self.lives),
            joined_at=self.joined_at,
            left_at=self.left_at,
        )
