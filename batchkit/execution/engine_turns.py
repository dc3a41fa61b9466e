"""Turns of engines: which engines of a job are loaded together, and which one after another.

With several turns, a row may need an engine that is not loaded. Such a row is paused: its coroutine is dropped
(``rollouts/``). Once all rows have ended or are paused, the engine that most paused rows need is loaded. All paused
rows then begin again, with their recorded generations from the ledger.
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
    """The engines of a job in groups. The engines of one group are loaded together; the groups are loaded one after
    another.

    - ``groups``: engine names. The first name of a group is in no other group, and identifies the group.
    - ``why``: reason for the groups, for the log; "" if the job has one engine.
    - ``environments``: environment variables for the engines' processes, by engine name.
    """

    groups: Sequence[Sequence[str]]
    why: str = ""
    environments: Mapping[str, Mapping[str, str]] = MappingProxyType({})


def grouping_of(job: JobConfig) -> Grouping:
    """Return the groups of the job's engines.

    All engines form one group if at most one of them holds a model on this machine, or if ``workers.gpus`` has
    enough GPUs for all of them (0 means that they use no GPU). Otherwise each engine with a model on this machine is a
    group. An engine that uses a running server needs no memory here, so it is in every group.
    """
    names = job.engine_names
    if len(names) == 1:
        return Grouping([names])
    jobs = {name: job.with_engine(name) for name in names}
    own = {name: job for name, job in jobs.items() if is_loaded_here(job.engine)}
    obstacle, environments = side_by_side(own, job.workers.gpus)
    if not obstacle:
        return Grouping([names], "engines are loaded together", environments)
    shown = " and ".join(map(_label, own))
    why = (
        f"engines are loaded one after the other, because {shown} each hold a model and {obstacle}"
    )
    others = [name for name in names if name not in own]
    return Grouping([[name, *others] for name in own], why)


def is_loaded_here(engine: EngineTable) -> bool:
    """Return whether the engine holds a model on this machine."""
    return holds_model(engine.kind) or engine.server is not None


def side_by_side(
    jobs: Mapping[str, JobConfig], room: float | None
) -> tuple[str, Mapping[str, Mapping[str, str]]]:
    """Return why the engines of ``jobs`` can't be loaded together ("" if they can), and which GPUs each engine gets.

    The GPUs are returned as environment variables by engine name.

    - ``jobs``: a job per engine, by engine name.
    - ``room``: number of GPUs. 0: the engines use none. None: unknown.
    """
    gpus = {name: job.engine_gpus for name, job in jobs.items()}
    if len(jobs) < 2:
        return "", {}
    obstacle = _obstacle([job.engine for job in jobs.values()], sum(gpus.values()), room)
    shares = _shares(gpus) if room and not obstacle else {}
    return obstacle, {name: {"CUDA_VISIBLE_DEVICES": share} for name, share in shares.items()}


def _obstacle(engines: Collection[EngineTable], needed: int, room: float | None) -> str:
    """Return why these engines can't be loaded together; "" if they can.

    ``needed``: number of GPUs that they need. ``room``: as in ``side_by_side``.
    """
    if any(engine.in_process for engine in engines):
        return "engine.in_process allows one engine"
    if room == 0:
        return ""
    if room is None:
        return "workers.gpus is not set"
    if any(engine.server is not None for engine in engines):
        return "it is unknown which GPUs a server uses"
    if room < needed:
        return f"they need {needed} GPUs, but there are {room:g}"
    return ""


class Turns:
    """The order in which a start loads groups of engines, and the rows that are paused. ``say`` writes to the log."""

    def __init__(self, job: JobConfig, say: Callable[[str], None]) -> None:
        self._job, self._say = job, say
        groups, self._why, self.environments = grouping_of(job)
        self._groups = {group[0]: group for group in groups}
        self.are_several = len(groups) > 1
        self._paused: defaultdict[str, IndexSet] = defaultdict(IndexSet)
        self.number = 0

    def first(self, interrupted: str | None) -> Sequence[str]:
        """Return the engines to load first.

        ``interrupted``: name of the group that was loaded when an earlier start was interrupted; it is loaded first.
        """
        if self._why:
            self._say(self._why)
        asked = [step.engine for step in self._job.steps if step.engine in self._groups]
        changes = sum(one != next_one for one, next_one in pairwise(asked))
        if self.are_several and changes >= len(self._groups):
            self._say(
                f"the steps change the engine {changes} times, and each change loads a model: order the steps so"
                " that steps of one engine follow each other, or give workers.gpus a GPU for each engine"
            )
        self.number = 1
        first = next(iter(self._groups))
        return self._groups[first if interrupted not in self._groups else interrupted]

    def next(self) -> tuple[Sequence[str], IndexSet]:
        """Return the engines to load next, and the indexes of all paused rows.

        The engines are those of the group that most paused rows need. Rows that need another group will be paused
        again.
        """
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
    return f"[engines.{name}]" if name else "[engine]"


def _shares(gpus: Mapping[str, int]) -> dict[str, str]:
    """Divide the visible GPUs among the engines, and return the value of ``CUDA_VISIBLE_DEVICES`` for each one by name.

    ``gpus``: number of GPUs that each engine needs.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = iter(visible.split(",") if visible else map(str, range(sum(gpus.values()))))
    return {name: ",".join(islice(devices, n)) for name, n in gpus.items()}
