"""One of several workers, as the run sees it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batchkit.execution.cluster.actor import Place
from batchkit.execution.cluster.leases import LeaseHolder
from batchkit.execution.events import EngineHistory, Load
from batchkit.execution.worker import EngineFacts
from batchkit.storage.manifest import WorkerState


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
    """A worker over all its lives."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.rows = 0
        self.lives: list[Life] = []

    def begin(self, actor: Any, known: Mapping[str, EngineHistory]) -> None:
        """Its next life; what it knows of its search for a poison row, it still knows."""
        before = {name: self.history(name) for name in known}
        self.lives.append(
            Life(
                actor,
                {
                    name: history._replace(restarts=0, steps=known[name].steps)
                    for name, history in before.items()
                },
            )
        )

    @property
    def life(self) -> Life:
        return self.lives[-1]

    def history(self, engine: str) -> EngineHistory:
        return self.life.history(engine) if self.lives else EngineHistory(engine=engine)

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
            restarts=len(self.lives) - 1,
            engine_restarts=self.engine_restarts,
        )
