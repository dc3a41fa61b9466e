"""One of several workers, as the run sees it."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from batchkit.execution.cluster.actor import Place
from batchkit.execution.events import EngineHistory, Load
from batchkit.execution.worker import EngineFacts
from batchkit.storage.manifest import WorkerState
from batchkit.types import Task


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
        """Its next life; what it knows of its search for a poison row, it still knows."""
        before = self.lives[-1].histories if self.lives else {}
        histories = {
            name: before.get(name, EngineHistory(engine=name))._replace(
                restarts=0, steps=learned.steps
            )
            for name, learned in known.items()
        }
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
