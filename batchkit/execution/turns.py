"""Which of a job's engines are loaded together, and which one after another, over all rows.

Where each has its turn, a row that asks another engine than the one that is loaded is paused: its
coroutine is dropped (``rollouts/``). Once all rows have ended or are paused, the engine that most of them
want is loaded, and they begin again with the generations that the ledger has of them.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import reduce
from itertools import islice, pairwise
from operator import or_
from types import MappingProxyType
from typing import NamedTuple

from batchkit.config.tables import EngineTable, JobConfig
from batchkit.engines.registry import holds_model
from batchkit.execution.rollouts.rollouts import PausedRow
from batchkit.storage.index_set import IndexSet


class Grouping(NamedTuple):
    """``groups``: names of engines that are loaded together, one group after another; a group has its
    name from the first, which is in no other. ``why``: for the log; empty if there is one engine.
    ``environments``: by name, of the engines' processes."""

    groups: Sequence[Sequence[str]]
    why: str = ""
    environments: Mapping[str, Mapping[str, str]] = MappingProxyType({})


def grouping_of(job: JobConfig) -> Grouping:
    """Engines are loaded together if at most one of them holds a model on this machine (a server
    that runs already costs nothing here, so it is in each group), or if ``run.worker_gpus`` has all GPUs that they ask for; 0
    says that they use none. Else each has its turn."""
    names = job.engine_names
    if len(names) == 1:
        return Grouping([names])
    jobs = {name: job.with_engine(name) for name in names}
    own = {name: job for name, job in jobs.items() if is_loaded_here(job.engine)}
    obstacle, environments = side_by_side(own, job.run.worker_gpus)
    if not obstacle:
        return Grouping([names], "engines are loaded together", environments)
    shown = " and ".join(map(_label, own))
    why = f"one engine is loaded at a time, for all rows: {shown} hold a model each, and {obstacle}"
    others = [name for name in names if name not in own]
    return Grouping([[name, *others] for name in own], why)


def is_loaded_here(engine: EngineTable) -> bool:
    """Whether it holds a model on this machine."""
    return holds_model(engine.kind) or engine.server is not None


def side_by_side(
    jobs: Mapping[str, JobConfig], room: float | None
) -> tuple[str, Mapping[str, Mapping[str, str]]]:
    """Why there is no room for the engines of all these ``jobs`` together, by their names, if there is none; and the
    environments of their processes. ``room``: the GPUs that there are for them; 0: they use none; None: nobody knows."""
    gpus = {name: job.engine_gpus for name, job in jobs.items()}
    if len(jobs) < 2:
        return "", {}
    obstacle = _obstacle([job.engine for job in jobs.values()], sum(gpus.values()), room)
    shares = _shares(gpus) if room and not obstacle else {}
    return obstacle, {name: {"CUDA_VISIBLE_DEVICES": share} for name, share in shares.items()}


def _obstacle(engines: Collection[EngineTable], needed: int, room: float | None) -> str:
    """Why the GPUs have no room for these engines together; empty if they have."""
    if any(engine.in_process for engine in engines):
        return "engine.in_process has room for one"
    if room == 0:
        return ""
    if room is None:
        return "run.worker_gpus is not set"
    if any(engine.server is not None for engine in engines):
        return "only the command of a server says which GPUs it uses"
    if room < needed:
        return f"they ask for {needed} GPUs, and there are {room:g}"
    return ""


class Turns:
    """The turns of one start, and the rows that are paused. ``say`` gets lines for the log."""

    def __init__(self, job: JobConfig, say: Callable[[str], None]) -> None:
        self._job, self._say = job, say
        groups, self._why, self.environments = grouping_of(job)
        self._groups = {group[0]: group for group in groups}
        self.are_several = len(groups) > 1
        self._paused: defaultdict[str, IndexSet] = defaultdict(IndexSet)
        self.number = 0

    def first(self, interrupted: str | None) -> Sequence[str]:
        """The engines to load first; ``interrupted`` is the one whose turn an earlier start did not end."""
        if self._why:
            self._say(self._why)
        asked = [step.engine for step in self._job.steps if step.engine in self._groups]
        changes = sum(one != next_one for one, next_one in pairwise(asked))
        if self.are_several and changes >= len(self._groups):
            self._say(
                f"the steps change the engine {changes} times, and each change loads a model: let a row ask"
                " all of one engine before it asks the next, or give run.worker_gpus a GPU for each engine"
            )
        self.number = 1
        first = next(iter(self._groups))
        return self._groups[first if interrupted not in self._groups else interrupted]

    def next(self) -> tuple[Sequence[str], IndexSet]:
        """The engines to load next, one of which most of the paused rows want, and all of these rows:
        others may have to wait again."""
        engine = max(self._paused, key=lambda name: len(self._paused[name]))
        due = reduce(or_, self._paused.values())
        n_rows = len(self._paused[engine])
        self._say(f"next engine: {_label(engine)}; rows that wait for it: {n_rows:,}")
        self._paused.clear()
        self.number += 1
        return self._groups[engine], due

    def pause(self, row: PausedRow) -> None:
        self._paused[row.engine].add(row.index)

    @property
    def n_paused(self) -> int:
        return sum(map(len, self._paused.values()))


def _label(name: str) -> str:
    """The engine's table in the job file."""
    return f"[engines.{name}]" if name else "[engine]"


def _shares(gpus: Mapping[str, int]) -> dict[str, str]:
    """The devices of each engine, as ``CUDA_VISIBLE_DEVICES``."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = iter(visible.split(",") if visible else map(str, range(sum(gpus.values()))))
    return {name: ",".join(islice(devices, n)) for name, n in gpus.items()}
