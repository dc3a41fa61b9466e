"""Decides which rows each worker gets, and how many.

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
from collections.abc import Callable, Collection, Sequence

from batchkit.execution.bisection import Suspects
from batchkit.execution.cluster.ray_worker import RayWorker
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
