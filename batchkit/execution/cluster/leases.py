"""Decides how many rows each worker gets.

A row is handed out as a lease: the worker holds it until its record comes back, or until the worker
dies; then it is handed out again. A worker holds as many rows as its engine can use, so a slow one
gets fewer. Near the end of the input no worker gets more rows than it can finish while the others
finish theirs, down to single rows: so all of them end at about the same time.

What a worker held when it died is replayed in halves (``bisection.py``), by the first worker that
has nothing else to do. So a row that kills workers is found, and the others are answered.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice

from batchkit.execution.bisection import Suspects
from batchkit.execution.rate_meter import RateMeter
from batchkit.types import Task

MOST_IN_A_LEASE = 256
RATE_SPAN_S = 30.0
_SAMPLES = 8


class LeaseHolder:
    """The rows that one worker holds, and how fast it answers.

    ``capacity``: rows that it can use at a time; 0 while its model loads.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._busy_since = self._busy_s = 0.0
        self.capacity = 0
        self.settled = 0
        self._meter = self._new_meter()
        self.held: dict[int, Task] = {}
        self.suspects = Suspects[Task]()
        self.deaths_in_a_row = 0

    def take(self, tasks: Iterable[Task]) -> None:
        """Add ``tasks`` to the rows that it holds."""
        if not self.held:
            self._busy_since = self._clock()
        self.held |= {task.row.index: task for task in tasks}

    def settle(self, indices: Collection[int]) -> list[Task]:
        """Remove the rows with these indices, whose records came back, and return them."""
        if not indices:
            return []
        now = self._busy()
        settled = [self.held.pop(index) for index in indices]
        if not self.held:
            self._busy_s = now
        self.settled += len(indices)
        self.deaths_in_a_row = 0
        self._meter.add(now, [self.settled])
        return settled

    def die(self, cause: str) -> Task | None:
        """It died: what it held becomes suspect. Returns the row at fault, once that is proven."""
        self.deaths_in_a_row += 1
        self.capacity = 0
        held, self.held = list(self.held.values()), {}
        self._busy_s = 0.0
        self._meter = self._new_meter()
        return self.suspects.died(held, cause) if held else None

    def forfeit(self) -> None:
        """It is given up, and its rows are not at fault: they are to be replayed as one group."""
        if self.held:
            self.suspects.interpose(list(self.held.values()))
            self.held = {}

    @property
    def rate(self) -> float:
        """Rows per second, over the last half minute that it held any; 0 if none came back."""
        (rate,) = self._meter.per_s(self._busy(), [self.settled])
        return rate

    def _new_meter(self) -> RateMeter:
        return RateMeter(0.0, [self.settled], span_s=RATE_SPAN_S, spacing_s=RATE_SPAN_S / _SAMPLES)

    def _busy(self) -> float:
        """Seconds during which it has held rows."""
        return self._busy_s + (self._clock() - self._busy_since if self.held else 0.0)


class Leases:
    """``holders`` are the workers that may get rows, by number.

    ``quarantined``: indices of rows that killed an engine or a worker before; each goes out alone.
    """

    def __init__(
        self,
        n_workers: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        quarantined: Collection[int] = (),
    ) -> None:
        self._quarantined = quarantined
        self.holders = {number: LeaseHolder(clock) for number in range(n_workers)}
        self._orphans: deque[Suspects[Task]] = deque()

    @property
    def n_held(self) -> int:
        """Rows that workers hold."""
        return sum(len(holder.held) for holder in self.holders.values())

    @property
    def are_settled(self) -> bool:
        """True if no worker holds a row and none waits for replay."""
        suspected = any(holder.suspects for holder in self.holders.values())
        return not (self.n_held or suspected or self._orphans)

    def give_up(self, number: int) -> None:
        """This worker gets no more rows; another replays what it held and its suspects."""
        gone = self.holders.pop(number)
        gone.forfeit()
        if gone.suspects:
            self._orphans.append(gone.suspects)

    def lease(
        self, number: int, left: int | None, next_task: Callable[[], Task | None]
    ) -> Sequence[Task]:
        """The rows that this worker gets now: suspects alone, else as many new rows as it may have.

        ``next_task`` gives the next row, or None if there is none now; ``left`` is how many are
        still to come, or None if that is unknown.
        """
        holder = self.holders[number]
        tasks = self._suspects(holder)
        if tasks is None:
            new = iter(next_task, None)
            tasks = list(islice(new, min(self._room(holder, left), MOST_IN_A_LEASE)))
            for task in tasks:
                if task.row.index in self._quarantined:
                    holder.suspects.suspect(task)
            tasks = [task for task in tasks if task.row.index not in self._quarantined]
        if holder.capacity and not tasks and not holder.held:
            if not holder.suspects:
                self._adopt(holder)
            tasks = self._suspects(holder) or []
        holder.take(tasks)
        return tasks

    def _suspects(self, holder: LeaseHolder) -> Sequence[Task] | None:
        """The suspects to replay now; empty while it holds others. None if it has no suspects."""
        if not holder.suspects:
            return None
        return [] if holder.held else (holder.suspects.next_group() or None)

    def _adopt(self, idle: LeaseHolder) -> None:
        """Give ``idle``, which has none, the suspects of a dead or given-up worker."""
        if self._orphans:
            idle.suspects = self._orphans.popleft()
            return
        for other in self.holders.values():
            if other.suspects and not other.held and not other.capacity:  # dead, not back yet
                idle.suspects, other.suspects = other.suspects, idle.suspects
                return

    def _room(self, holder: LeaseHolder, left: int | None) -> int:
        """How many more rows it may hold."""
        room = holder.capacity - len(holder.held)
        if left is None or room <= 0:
            return max(0, room)
        at_work = [one for one in self.holders.values() if one.capacity]
        rates = [one.rate for one in at_work]
        if not holder.rate:  # it may be slow: at first only what its engine runs at once
            share = min(math.ceil((left + self.n_held) / len(at_work)), holder.capacity // 2)
            return max(0, min(room, share - len(holder.held)))
        end_s = (left + self.n_held) / sum(rates)
        soonest_s = min(
            (len(one.held) + 1) / rate for one, rate in zip(at_work, rates, strict=True) if rate
        )
        in_time = holder.rate * max(end_s, soonest_s) * (1 + 1e-9)
        return max(0, min(room, math.floor(in_time) - len(holder.held)))
