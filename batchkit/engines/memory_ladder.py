"""Reduces an engine's memory use after it ran out of memory.

``max_num_seqs`` is halved to 1, then ``max_num_batched_tokens`` to 512, then the engine's claim
(its share of the GPU, or a fixed KV cache). The claim is reduced first if it was the only problem:
more was requested than is free. It is kept if the KV cache found no room: less would not help.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from batchkit.engines.faults import Fault

LEAST_BATCHED_TOKENS = 512
LEAST_SHARE, LEAST_SHARE_FREE = 0.5, 0.1
LEAST_CACHE_BYTES = 64 * 2**20


class Ladder:
    """The engine options in force, as overrides of the job's."""

    def __init__(self, steps: Iterable[Mapping[str, Any]] | None = None) -> None:
        self._steps = [dict(step) for step in steps or ()]
        self.keep()

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The steps down so far."""
        return list(self._steps)

    @property
    def overrides(self) -> Mapping[str, Any]:
        """The options that replace the job's."""
        merged: dict[str, Any] = {}
        for step in self._steps:
            merged |= step
        return merged

    def step_down(
        self, limits: Mapping[str, Any], fault: Fault, *, alone: bool = False
    ) -> dict[str, Any] | None:
        """Take the next smaller setting and return it; None at the bottom, or if it is in force and was not obeyed.

        ``limits`` are the options in force that decide the engine's memory; ``fault`` is an oom.
        ``alone``: only one request ran, so fewer at once would not help.
        """
        step = _smaller(limits, fault, alone=alone)
        if step is None or step.items() <= self.overrides.items():
            return None
        self._steps.append(step)
        return step

    def undo(self, n_steps: int) -> None:
        """Undo the last ``n_steps``, which did not help."""
        del self._steps[len(self._steps) - n_steps :]

    def keep(self) -> None:
        """The settings in force have answered rows: ``back`` returns to them."""
        self._kept = list(self._steps)

    def back(self) -> None:
        """Return to the settings that were kept last."""
        self._steps = list(self._kept)


def _smaller(limits: Mapping[str, Any], fault: Fault, *, alone: bool) -> dict[str, Any] | None:
    if fault.is_over_claim:
        return _smaller_claim(limits, LEAST_SHARE_FREE)
    running = limits.get("max_num_seqs", 1)
    if running > 1 and not alone:
        return {"max_num_seqs": running // 2}
    least = max(LEAST_BATCHED_TOKENS, running)  # vLLM needs at least one per request
    if (tokens := limits.get("max_num_batched_tokens", 0)) > least:
        return {"max_num_batched_tokens": max(least, tokens // 2)}
    return None if fault.is_without_cache else _smaller_claim(limits, LEAST_SHARE)


def _smaller_claim(limits: Mapping[str, Any], least_share: float) -> dict[str, Any] | None:
    if (cache := limits.get("kv_cache_memory_bytes")) is not None:
        return {"kv_cache_memory_bytes": cache // 2} if cache // 2 >= LEAST_CACHE_BYTES else None
    share = round(limits.get("gpu_memory_utilization", 0.0) - 0.1, 2)
    return {"gpu_memory_utilization": share} if share >= least_share else None
