"""Smaller settings for an engine that ran out of memory, one reduction after another.

``max_num_seqs`` is halved down to 1, then ``max_num_batched_tokens`` down to 512. Then the engine's memory claim is
reduced: its share of the GPU, or a fixed KV cache.

- The claim is reduced first if the engine claimed more memory than was free.
- The claim is never reduced if the model left no memory for the KV cache, because a smaller claim would not help.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from batchkit.engines.faults import Fault

LEAST_BATCHED_TOKENS = 512
LEAST_SHARE, LEAST_SHARE_FREE = 0.5, 0.1
LEAST_CACHE_BYTES = 64 * 2**20


class Ladder:
    """The engine options that were reduced after out-of-memory errors. They override the job's options."""

    def __init__(self, reductions: Iterable[Mapping[str, Any]] | None = None) -> None:
        self._reductions = [dict(reduction) for reduction in reductions or ()]
        self.save()

    @property
    def reductions(self) -> list[dict[str, Any]]:
        """The changed options after each out-of-memory error, oldest first, for example ``{"max_num_seqs": 128}``."""
        return list(self._reductions)

    @property
    def overrides(self) -> Mapping[str, Any]:
        """All reduced options in one dict. They replace the job's options."""
        merged: dict[str, Any] = {}
        for reduction in self._reductions:
            merged |= reduction
        return merged

    def reduce(
        self, limits: Mapping[str, Any], fault: Fault, *, alone: bool = False
    ) -> dict[str, Any] | None:
        """Reduce the next option, and return it with its new value.

        Return None if all options are at their minimum, or if the engine ignored the last reduction.

        - ``limits``: the options in force that affect the engine's memory.
        - ``fault``: the out-of-memory fault.
        - ``alone``: only one request ran, so a smaller batch would not help.
        """
        reduction = _smaller(limits, fault, alone=alone)
        if reduction is None or reduction.items() <= self.overrides.items():
            return None
        self._reductions.append(reduction)
        return reduction

    def undo(self, count: int) -> None:
        """Undo the last ``count`` reductions, which did not help."""
        del self._reductions[len(self._reductions) - count :]

    def save(self) -> None:
        """Save the current reductions, because the engine has answered rows with them. ``restore`` returns to the saved
        reductions."""
        self._kept = list(self._reductions)

    def restore(self) -> None:
        """Return to the reductions saved by ``save``."""
        self._reductions = list(self._kept)


def _smaller(limits: Mapping[str, Any], fault: Fault, *, alone: bool) -> dict[str, Any] | None:
    if fault.is_over_claim:
        return _smaller_claim(limits, LEAST_SHARE_FREE)
    running = limits.get("max_num_seqs", 1)
    if running > 1 and not alone:
        return {"max_num_seqs": running // 2}
    least = max(LEAST_BATCHED_TOKENS, running)  # vLLM needs at least one token per request
    if (tokens := limits.get("max_num_batched_tokens", 0)) > least:
        return {"max_num_batched_tokens": max(least, tokens // 2)}
    return None if fault.is_without_cache else _smaller_claim(limits, LEAST_SHARE)


def _smaller_claim(limits: Mapping[str, Any], least_share: float) -> dict[str, Any] | None:
    if (cache := limits.get("kv_cache_memory_bytes")) is not None:
        return {"kv_cache_memory_bytes": cache // 2} if cache // 2 >= LEAST_CACHE_BYTES else None
    share = round(limits.get("gpu_memory_utilization", 0.0) - 0.1, 2)
    return {"gpu_memory_utilization": share} if share >= least_share else None
