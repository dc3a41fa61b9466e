"""One of several workers, as the run sees it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchkit.execution.cluster.actor import IDLE, Load, Place
from batchkit.execution.cluster.leases import LeaseHolder
from batchkit.execution.events import EngineHistory
from batchkit.execution.worker import EngineFacts
from batchkit.storage.manifest import WorkerState


@dataclass
class Life:
    """One life of a worker: from its wait for a place to its death. ``histories``: of its engines, by
    name, with the state of its own search for a poison row. ``returned``: generations that are
    not in the ledger yet; ``written``: those that are, which the worker does not know yet.
    """

    began_at: float
    histories: Mapping[str, EngineHistory] = field(default_factory=dict)
    place: Place | None = None
    engine: EngineFacts | None = None
    load: Load = IDLE
    is_said_to_wait: bool = False
    returned: int = 0
    written: int = 0

    def history(self, engine: str) -> EngineHistory:
        return self.histories.get(engine, EngineHistory(engine=engine))

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
    """A worker over all its lives. ``call`` is the pending one."""

    def __init__(self, number: int, actor: Any) -> None:
        self.number = number
        self.actor = actor
        self.call: Any = None
        self.called_at = self.begins_at = self.looked_at = time.monotonic()
        self.rows = 0
        self.life = Life(self.called_at)
        self._before: list[Life] = []

    def bury(self) -> None:
        """Record a death and begin the next life."""
        self._before.append(self.life)
        self.begins_at = time.monotonic()
        before = self.life.histories
        kept = {name: history._replace(restarts=0) for name, history in before.items()}
        self.life = Life(self.begins_at, kept)

    @property
    def lives(self) -> Sequence[Life]:
        return *self._before, self.life

    @property
    def deaths(self) -> int:
        return len(self._before)

    @property
    def engine_restarts(self) -> int:
        return sum(life.engine_restarts for life in self.lives)

    @property
    def retried(self) -> int:
        return sum(life.load.retried for life in self.lives)

    @property
    def state(self) -> str:
        if self.life.place is None:
            return "waiting for a place"
        return "loading" if self.life.engine is None else "working"

    def noted(self, holder: LeaseHolder | None) -> WorkerState:
        """As it is noted in the manifest; ``holder`` is None if the worker was given up."""
        place = self.life.place
        return WorkerState(
            worker=self.number,
            state="given up" if holder is None else self.state,
            node=None if place is None else place.node,
            gpus=[] if place is None else list(place.gpus),
            rows=self.rows,
            rows_per_s=0.0 if holder is None else round(holder.rate, 3),
            in_flight=0 if holder is None else self.life.load.in_flight,
            restarts=self.deaths,
            engine_restarts=self.engine_restarts,
        )
