"""Smaller settings for an engine that ran out of memory.

``max_num_seqs`` is halved down to 1, then ``max_num_batched_tokens`` down to 512, then the engine's memory claim
(its share of the GPU, or a fixed KV cache). The claim is reduced first if the engine claimed more memory than
was free. It is never reduced if the KV cache had too little room, because that would not help.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from batchkit.engines.faults import Fault

LEAST_BATCHED_TOKENS = 512
LEAST_SHARE, LEAST_SHARE_FREE = 0.5, 0.1
LEAST_CACHE_BYTES = 64 * 2**20


class Ladder:
    """The engine options that were reduced step by step after out of memory. They override the job's options."""

    def __init__(self, steps: Iterable[Mapping[str, Any]] | None = None) -> None:
        self._steps = [dict(step) for step in steps or ()]
        self.keep()

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The reductions so far, in order."""
        return list(self._steps)

    @property
    def overrides(self) -> Mapping[str, Any]:
        """The options that replace the job's options."""
        merged: dict[str, Any] = {}
        for step in self._steps:
            merged |= step
        return merged

    def step_down(
        self, limits: Mapping[str, Any], fault: Fault, *, alone: bool = False
    ) -> dict[str, Any] | None:
        """Apply the next smaller setting and return it. Return None at the minimum, or if the engine ignored the
        setting.

        ``limits`` are the options in force that affect the engine's memory; ``fault`` is an out-of-memory fault.
        ``alone``: only one request ran, so a smaller batch would not help.
        """
        step = _smaller(limits, fault, alone=alone)
        if step is None or step.items() <= self.overrides.items():
            return None
        self._steps.append(step)
        return step

    def undo(self, n_steps: int) -> None:
        """Undo the last ``n_steps`` reductions, which did not help."""
        del self._steps[len(self._steps) - n_steps :]

    def keep(self) -> None:
        """Save the current settings, because the engine has answered rows with them; ``back`` returns to them."""
        self._kept = list(self._steps)

    def back(self) -> None:
        """Return to the settings saved by ``keep``."""
        self._steps = list(self._kept)


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
