"""What ``tune`` may try, in the order in which it is worth trying."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from batchkit.commands.tuning.options import SIZE
from batchkit.config.tables import JobConfig
from batchkit.engines.memory import gpus

_ONLY_FOR: Mapping[str, str] = {
    "run.render_threads": "rendering",
    "run.look_ahead": "prefill",
    "mm_processor_cache_gb": "preprocessing",
    "gpu_memory_utilization": "kv-cache",
    "kv_cache_memory_bytes": "kv-cache",
    "block_size": "kv-cache",
    "max_cudagraph_capture_size": "decode",
    "long_prefill_token_threshold": "prefill",
}
"""Options that are tried only while this is what the fastest options so far wait for."""
_OF_RUN = ("render_threads", "look_ahead")
_GPUS = ("run.workers", "tensor_parallel_size")
_FIRST_FOR: Mapping[str, str] = {
    "max_num_batched_tokens": "prefill",
    "enable_prefix_caching": "prefill",
    "enable_chunked_prefill": "prefill",
    "async_scheduling": "decode",
    "enforce_eager": "decode",
}


@dataclass(frozen=True, slots=True)
class Choice:
    """An option of the search: a number to ``walk`` from, the value in force, or ``others``, each a set of options
    that is tried as a whole, None for the job's own. ``helps``: against what, as ``Bottleneck.resource`` has it; ``is_only``: against nothing
    else."""

    name: str
    walk: int | None = None
    others: list[dict[str, Any]] = field(default_factory=list)
    helps: str = ""
    is_only: bool = False

    @property
    def is_first(self) -> bool:
        """Whether more requests at once would hide what it gains."""
        return self.is_only and self.helps in ("rendering", "preprocessing", "kv-cache")


def choices(job: JobConfig, options: Mapping[str, Any]) -> list[Choice]:
    """Of the engine's ``options`` and of ours."""
    found = (_choice(name, value) for name, value in options.items())
    ours = (_choice(f"run.{name}", getattr(job.run, name)) for name in _OF_RUN)
    return [*_of_gpus(job), *found, *ours]


def next_of(left: list[Choice], waits_for: str) -> Choice | None:
    """Take out the one that is worth trying next, while the fastest options wait for ``waits_for``: how the GPUs are
    used, which decides how many requests fit, then how many run at once, then the rest."""
    may = [choice for choice in left if not choice.is_only or choice.helps == waits_for]
    if not may:
        return None
    found = min(
        may,
        key=lambda c: (c.name not in _GPUS, not c.is_first, c.name != SIZE, c.helps != waits_for),
    )
    left.remove(found)
    return found


def _choice(name: str, value: Any) -> Choice:
    is_only = name in _ONLY_FOR
    helps = (_ONLY_FOR if is_only else _FIRST_FOR).get(name, "")
    if isinstance(value, int) and not isinstance(value, bool):
        return Choice(name, walk=value, helps=helps, is_only=is_only)
    values = {bool: [not value], list: value}.get(type(value), [])
    return Choice(name, others=[{name: other} for other in values], helps=helps, is_only=is_only)


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
    others = [
        {"tensor_parallel_size": n, "run.workers": n_gpus // n if n_gpus > n else None}
        for n in groups
    ]
    if others:
        yield Choice("tensor_parallel_size", others=others)
