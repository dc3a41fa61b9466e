"""The places of a run's engines: one for each engine of the job, or several with ``workers.per_gpu``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from batchkit.config.tables import JobConfig
from batchkit.engines.memory import visible_gpus
from batchkit.engines.registry import for_share_of_gpu, holds_model
from batchkit.errors import JobError

KEY = "workers.per_gpu"
DEVICES = "CUDA_VISIBLE_DEVICES"


class Place(NamedTuple):
    """The place of one loaded engine.

    - ``name``: name in ``[engines]``; "" for ``[engine]``.
    - ``number``: 1, 2, … among the engines with this name; 0 without ``workers.per_gpu``.
    - ``of``: number of engines with this name.
    - ``on_gpu``: number of engines that share its GPU.
    - ``environment``: variables of its process, in addition to the run's own.
    """

    name: str
    number: int = 0
    of: int = 1
    on_gpu: int = 1
    environment: Mapping[str, str] = MappingProxyType({})

    @property
    def id(self) -> str:
        """The name of the engine among all loaded engines, for logs and the pool."""
        return f"{self.name}#{self.number}" if self.number else self.name

    @property
    def label(self) -> str:
        """The engine in a message; "" if the run has only ``[engine]``."""
        numbered = f"{self.number} of {self.of}" if self.number else ""
        return " ".join(filter(None, ["engine" if self.id else "", self.name, numbered]))

    def job_of(self, job: JobConfig) -> JobConfig:
        """Return ``job`` with this place's engine as ``[engine]``, and with its share of the GPU's memory."""
        return for_share_of_gpu(job.with_engine(self.name), self.on_gpu)


def places_of(
    job: JobConfig, names: Sequence[str], environments: Mapping[str, Mapping[str, str]]
) -> list[Place]:
    """Return the places of the engines ``names``.

    ``environments``: by name, the variables that give an engine its GPUs.

    Raises:
        JobError: ``workers.per_gpu`` can't be used.
    """
    return [place for name in names for place in _places(job, name, environments.get(name, {}))]


def engines_of(job: JobConfig) -> int:
    """Return how many engines of one name the run loads."""
    if job.workers.per_gpu is None or job.engine.kind == "dry-run":
        return job.workers.least
    return job.workers.per_gpu * (job.workers.least if job.workers.count else visible_gpus())


def gpus_of(job: JobConfig) -> float:
    """Return the number of GPUs that the run uses. With ``workers.per_gpu``, these are all visible GPUs."""
    if job.workers.per_gpu is None or job.workers.count is not None:
        return job.gpus
    return visible_gpus()


def _places(job: JobConfig, name: str, environment: Mapping[str, str]) -> list[Place]:
    per_gpu, its = job.workers.per_gpu, job.with_engine(name)
    if per_gpu is None or its.engine.kind == "dry-run":
        return [Place(name, environment=environment)]
    _check(its, per_gpu)
    devices = _devices(environment)
    on = [device for device in devices for _ in range(per_gpu)]
    return [
        Place(name, number, len(on), per_gpu, {**environment, DEVICES: device})
        for number, device in enumerate(on, 1)
    ]


def _check(job: JobConfig, per_gpu: int) -> None:
    """Raise JobError if the engine can't be loaded several times."""
    if not holds_model(job.engine.kind):
        raise JobError(
            f'{KEY}: engine.kind = "{job.engine.kind}" loads no model onto a GPU; remove {KEY}'
        )
    for_share_of_gpu(job, per_gpu)  # raises if engines of this kind can't share a GPU
    if job.engine.in_process:
        raise JobError(f"{KEY}: engine.in_process allows one engine; remove one of the two")
    if job.engine_gpus > 1:
        raise JobError(
            f"{KEY} = {per_gpu}: the model is spread over {job.engine_gpus} GPUs (tensor_parallel_size ×"
            f" pipeline_parallel_size), and such an engine can't share them; remove {KEY} or these options"
        )


def _devices(environment: Mapping[str, str]) -> list[str]:
    """Return the visible GPUs as entries of ``CUDA_VISIBLE_DEVICES``.

    Raises:
        JobError: no GPU is visible.
    """
    if DEVICES in environment:
        return environment[DEVICES].split(",")
    if not (n_visible := visible_gpus()):
        raise JobError(
            f"{KEY}: no GPU is visible. On a CPU one engine already uses all cores, so a second one gains nothing;"
            f" remove {KEY}"
        )
    chosen = os.environ.get(DEVICES)
    return chosen.split(",")[:n_visible] if chosen else [*map(str, range(n_visible))]
