"""The workers of a run on Ray: how many there are, and with which engine settings each begins."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from itertools import chain, count

from batchkit.errors import BatchkitError, EngineError
from batchkit.execution.cluster.actor import Actor
from batchkit.execution.cluster.leases import Leases, RayWorker
from batchkit.execution.cluster.session import needs
from batchkit.execution.events import EngineHistory, Hear, Message
from batchkit.execution.start import Start
from batchkit.storage.starts import WorkerState

PLACE_S = 15.0  # report a worker that waits longer than this for resources
RESIZE_S = 1.0
MOST_LEFT = 50  # notes of workers that have left; older ones are dropped


class Hiring:
    """The workers of a run so far, and the hiring of further ones.

    With ``workers.count = "auto"``, some workers always wait for resources, so that one starts as soon as a node joins, and
    Ray's autoscaler sees the demand.

    - ``hear``: receives messages, and the histories of engines that have changed.
    - ``known``: histories of earlier starts, by engine.
    - ``leases``: a hired worker is added to its workers.
    - ``workers`` (attribute): all workers so far, also workers that have left.
    """

    def __init__(
        self,
        start: Start,
        engines: Sequence[str],
        hear: Hear,
        known: Mapping[str, EngineHistory],
        leases: Leases,
    ) -> None:
        import ray

        self.workers: list[RayWorker] = []
        self._start, self._hear, self._leases = start, hear, leases
        self._engines, self._known = engines, dict(known)
        self._numbers = count()
        self._failures: list[BatchkitError] = []  # of workers that were given up
        self._next_resize = 0.0
        # Ray itself must not restart a worker, so that no death is hidden.
        self._actor = ray.remote(Actor).options(
            **needs(start.job, engines), max_restarts=0, scheduling_strategy="SPREAD"
        )
        self._sent = ray.put(start.for_workers())

    def hire(self) -> None:
        """Add a worker, which begins once Ray has resources for it."""
        worker = RayWorker(next(self._numbers))
        self.begin(worker)
        self.workers.append(worker)
        self._leases.workers[worker.number] = worker

    def begin(self, worker: RayWorker) -> None:
        """Start a process of ``worker``."""
        actor = self._actor.remote(worker.number, self._sent, self._engines, self._known, sys.path)
        worker.begin(actor, self._known)

    def give_up(self, worker: RayWorker, failure: BatchkitError) -> None:
        """End a worker that has failed. Other workers get its rows."""
        self._leases.give_up(worker.number)
        self._failures.append(failure)
        worker.leave("given up")

    def resize(self, *, all_read: bool) -> None:
        """With ``workers.count = "auto"``: start or remove workers that wait for resources, until their number is
        ``_n_wanted``. ``all_read``: no row is left to hand out.

        Raises:
            EngineError: no worker is left, and no other one is hired.
        """
        if not self._start.job.workers.is_auto or time.monotonic() < self._next_resize:
            return
        self._next_resize = time.monotonic() + RESIZE_S
        if not (self._may_hire or any(one.joined_at for one in self._leases.workers.values())):
            raise EngineError(f"no worker is left; the last one failed: {self._failures[-1]}")
        waiting = [one for one in self._leases.workers.values() if not one.has_place]
        n_wanted = self._n_wanted(all_read=all_read)
        for worker in [one for one in waiting[n_wanted:] if one.joined_at is None]:
            worker.life.kill()
            self._leases.leave(worker.number)
            self.workers.remove(worker)
        for _ in range(n_wanted - len(waiting)):
            self.hire()

    def learn(self, worker: RayWorker, history: EngineHistory) -> None:
        """Use a worker's reduced engine settings for workers that start later, since their machines are alike."""
        name = history.engine
        none = EngineHistory(engine=name)
        before = self._known.get(name, none)
        worker.life.histories = {**worker.life.histories, (name, history.number): history}
        lives = [life.histories_of(name) for one in self.workers for life in one.lives]
        newest = [one.life.histories_of(name) for one in self.workers]
        learned = EngineHistory(
            sum(one.restarts for one in chain.from_iterable(lives)),
            max((one.reductions for one in chain([none], *newest)), key=len),
            name,
        )
        if learned != before:
            self._known[name] = learned
            self._hear(learned)

    def report_waiting(self) -> None:
        """Report workers that wait for resources, once each. With ``auto``, only while there are fewer workers than
        ``workers.min``."""
        table = self._start.job.workers
        if table.is_auto and self.n_placed >= table.min:
            return
        now = time.monotonic()
        for worker in self._leases.workers.values():
            life = worker.life
            if worker.has_place or life.is_said_to_wait or now - life.began_at < PLACE_S:
                continue
            life.is_said_to_wait = True
            wanted = needs(self._start.job, self._engines)
            text = (
                f"worker {worker.number} waits for resources: it needs {wanted['num_cpus']:g}"
                f" CPUs and {wanted['num_gpus']:g} GPUs on one node"
            )
            self._hear(Message(text))

    @property
    def n_placed(self) -> int:
        """The number of workers that have resources."""
        return sum(worker.has_place for worker in self._leases.workers.values())

    def noted(self) -> list[WorkerState]:
        """Return the state of each worker. With ``auto``, without workers that never had a node, and only the newest
        ``MOST_LEFT`` of the workers that have left."""
        if not self._start.job.workers.is_auto:
            return [worker.noted() for worker in self.workers]
        left = [worker for worker in self.workers if worker.left_at is not None]
        dropped = set(left[:-MOST_LEFT])
        return [one.noted() for one in self.workers if one.joined_at and one not in dropped]

    def _n_wanted(self, *, all_read: bool) -> int:
        """Return how many workers should wait for resources."""
        workers, table = self._leases.workers.values(), self._start.job.workers
        is_enough = any(one.has_place and not one.is_draining for one in workers)
        if not self._may_hire or (all_read and is_enough):
            return 0
        most = max(table.min, 2 * self.n_placed) if table.max is None else table.max
        return most - self.n_placed

    @property
    def _may_hire(self) -> bool:
        """False once more workers were given up than allowed, because another one would probably fail, too."""
        was_ready = any(one.up_since is not None for one in self.workers)
        limit = self._start.job.run.max_engine_restarts if was_ready else 0
        return len(self._failures) <= limit
