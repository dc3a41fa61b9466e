"""What ``tune`` may try, in the order in which it is worth trying."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from batchkit.commands.tuning.options import SIZE
from batchkit.config.tables import JobConfig
from batchkit.engines.memory import gpus

_HELPS: Mapping[str, str] = {
    "run.render_threads": "rendering",
    "mm_processor_cache_gb": "preprocessing",
    "gpu_memory_utilization": "kv-cache",
    "kv_cache_memory_bytes": "kv-cache",
    "block_size": "kv-cache",
    "max_cudagraph_capture_size": "decode",
    "long_prefill_token_threshold": "prefill",
}
"""Options that are tried only while this is what the fastest options so far wait for."""


@dataclass(frozen=True, slots=True)
class Choice:
    """An option of the search: a number to ``walk`` from, the value in force, or ``others``, each a set of options
    that is tried as a whole. ``helps``: what it takes away, as ``Bottleneck.resource`` has it; "" for any."""

    name: str
    walk: int | None = None
    others: list[dict[str, Any]] = field(default_factory=list)
    helps: str = ""


def choices(job: JobConfig, options: Mapping[str, Any]) -> list[Choice]:
    """Of the engine's ``options`` and of ours: how many requests run at once, then how the GPUs are used, then the
    rest."""
    found = [_choice(name, value) for name, value in options.items()]
    ours = [*_of_gpus(job), *_of_run(job)]
    first = [choice for choice in found if choice.name == SIZE]
    return first + ours + [choice for choice in found if choice.name != SIZE]


def _choice(name: str, value: Any) -> Choice:
    helps = _HELPS.get(name, "")
    if isinstance(value, bool):
        return Choice(name, others=[{name: not value}])
    if isinstance(value, list):
        return Choice(name, others=[{name: other} for other in value], helps=helps)
    return Choice(name, walk=value if isinstance(value, int) else None, helps=helps)


def _of_run(job: JobConfig) -> Iterator[Choice]:
    yield _choice("run.render_threads", job.run.render_threads)


def _of_gpus(job: JobConfig) -> Iterator[Choice]:
    """One engine on each GPU, or on each group of 2, 4, … that holds the model together."""
    n_gpus = len(gpus()) if job.engine.kind == "vllm" else 0
    across = job.engine.options.get("tensor_parallel_size", 1)
    across *= job.engine.options.get("pipeline_parallel_size", 1)
    if job.run.workers is None and n_gpus // across > 1:
        yield Choice("run.workers", others=[{"run.workers": n_gpus // across}])
    if across > 1 or job.run.workers is not None:
        return
    groups = [2**n for n in range(1, 8) if 2**n <= n_gpus]
    others = [{"tensor_parallel_size": n, "run.workers": n_gpus // n} for n in groups]
    if others:
        yield Choice("tensor_parallel_size", others=others)
