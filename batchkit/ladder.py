"""How an engine is made smaller after it ran out of memory, and larger again.

Down: ``max_num_seqs`` is halved to 1, then ``max_num_batched_tokens`` to 512, then the share of the
GPU (or the KV cache of a CPU) by a tenth. Up: one step back after a stretch of success, never past
where it began. A stretch that ended in memory running out again is doubled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LEAST_BATCHED_TOKENS = 512
LEAST_UTILIZATION = 0.5
STRETCH = 1000


class Ladder:
    """The engine options in force, as overrides of the job's own. ``steps`` is the way down so far."""

    def __init__(
        self, steps: list[dict[str, Any]] | None = None, *, stretch: int = STRETCH
    ) -> None:
        self.steps: list[dict[str, Any]] = steps or []
        self._stretch = stretch
        self._successes = 0

    @property
    def overrides(self) -> Mapping[str, Any]:
        """Options to lay over the job's."""
        merged: dict[str, Any] = {}
        for step in self.steps:
            merged |= step
        return merged

    def step_down(self, options: Mapping[str, Any], max_num_seqs: int) -> dict[str, Any] | None:
        """The next smaller setting, taken; None at the bottom. ``options`` are those in force."""
        self._successes = 0
        step = _smaller(options, max_num_seqs)
        if step is not None:
            self.steps.append(step)
        return step

    def succeeded(self, rows: int) -> bool:
        """Count ``rows`` more answers; True when it is time to try one step up."""
        self._successes += rows
        return bool(self.steps) and self._successes >= self._stretch

    def step_up(self) -> None:
        """Take back the last step; if it proves too much, the next try comes twice as late."""
        self.steps.pop()
        self._successes = 0
        self._stretch *= 2


def _smaller(options: Mapping[str, Any], max_num_seqs: int) -> dict[str, Any] | None:
    if max_num_seqs > 1:
        return {"max_num_seqs": max_num_seqs // 2}
    tokens = options.get("max_num_batched_tokens")
    if tokens is not None and tokens > LEAST_BATCHED_TOKENS:
        return {"max_num_batched_tokens": max(LEAST_BATCHED_TOKENS, tokens // 2)}
    if "kv_cache_memory_bytes" in options:
        return None
    share = options.get("gpu_memory_utilization", 0.9)
    if share > LEAST_UTILIZATION:
        return {"gpu_memory_utilization": round(share - 0.1, 2)}
    return None
