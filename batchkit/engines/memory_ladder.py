"""How an engine is made smaller after it ran out of memory, and larger again.

Down: ``max_num_seqs`` is halved to 1, then ``max_num_batched_tokens`` to 512, then the engine's claim
(its share of the GPU, or a fixed KV cache). The claim comes first where it alone was the trouble:
more was asked for than is free. It stays where the KV cache found no room: less would not help.

Up: one step back after a stretch of success, never past where it began. A step up that ended in
memory running out again doubles the stretch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchkit.engines.faults import Fault

LEAST_BATCHED_TOKENS = 512
LEAST_SHARE, LEAST_SHARE_FREE = 0.5, 0.1
LEAST_CACHE_BYTES = 64 * 2**20
STRETCH = 1000


class Ladder:
    """The engine options in force, as overrides of the job's own. ``steps`` is the way down so far."""

    def __init__(
        self, steps: list[dict[str, Any]] | None = None, *, stretch: int | None = None
    ) -> None:
        self.steps: list[dict[str, Any]] = steps or []
        self._stretch = stretch or STRETCH
        self._successes = 0
        self._on_trial = False

    @property
    def overrides(self) -> Mapping[str, Any]:
        """Options to lay over the job's."""
        merged: dict[str, Any] = {}
        for step in self.steps:
            merged |= step
        return merged

    def step_down(
        self, limits: Mapping[str, Any], fault: Fault, *, alone: bool = False
    ) -> dict[str, Any] | None:
        """The next smaller setting, taken; None at the bottom.

        ``limits`` are the options in force that decide the engine's memory; ``fault`` is an oom.
        ``alone``: one request ran, so that fewer at once would not help it.
        """
        self._successes = 0
        if self._on_trial:
            self._on_trial = False
            self._stretch *= 2
        step = _smaller(limits, fault, alone=alone)
        if step is not None:
            self.steps.append(step)
        return step

    def succeeded(self, rows: int) -> bool:
        """Count ``rows`` more answers; True when it is time to try one step up."""
        self._successes += rows
        if self._successes < self._stretch:
            return False
        self._on_trial = False
        return bool(self.steps)

    def step_up(self) -> None:
        """Take back the last step."""
        self.steps.pop()
        self._successes = 0
        self._on_trial = True


def _smaller(limits: Mapping[str, Any], fault: Fault, *, alone: bool) -> dict[str, Any] | None:
    if fault.is_over_claim:
        return _smaller_claim(limits, LEAST_SHARE_FREE)
    running = limits.get("max_num_seqs", 1)
    if running > 1 and not alone:
        return {"max_num_seqs": running // 2}
    least = max(LEAST_BATCHED_TOKENS, running)  # vLLM allows no fewer than one for each request
    if (tokens := limits.get("max_num_batched_tokens", 0)) > least:
        return {"max_num_batched_tokens": max(least, tokens // 2)}
    return None if fault.is_without_cache else _smaller_claim(limits, LEAST_SHARE)


def _smaller_claim(limits: Mapping[str, Any], least_share: float) -> dict[str, Any] | None:
    if (cache := limits.get("kv_cache_memory_bytes")) is not None:
        return {"kv_cache_memory_bytes": cache // 2} if cache // 2 >= LEAST_CACHE_BYTES else None
    share = round(limits.get("gpu_memory_utilization", 0.0) - 0.1, 2)
    return {"gpu_memory_utilization": share} if share >= least_share else None
