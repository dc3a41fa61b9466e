"""Finds the bottleneck of a job from its measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from batchkit.commands.tuning.table import Line

_MOSTLY = 0.2  # an engine of which a larger share waits is waiting too long
_LEAST_GROWTH = 1.5  # of the batch, for two trials to show what a larger one gains


class Bottleneck(NamedTuple):
    """``reason`` is one sentence with the figures."""

    resource: Literal["rendering", "preprocessing", "kv-cache", "decode", "prefill", "unknown"]
    reason: str


def bottleneck_of(lines: Sequence[Line], best: Line, *, with_images: bool) -> Bottleneck:
    """The bottleneck at the ``best`` size; ``lines`` are all sizes tried."""
    if best["waits"] is None and not best["typical"]:
        return Bottleneck("unknown", "the engine was not full for long enough to show it")
    waits = best["waits"] or dict.fromkeys(("rendering", "preparing", "kv_cache"), 0.0)
    if waits["rendering"] > _MOSTLY:
        what = "images are opened and prompts rendered" if with_images else "prompts are rendered"
        return Bottleneck(
            "rendering",
            f"{waits['rendering']:.0%} of the engine's places were empty because no row was ready: {what} too"
            " slowly",
        )
    if waits["preparing"] > _MOSTLY:
        what = "tokenised, and images preprocessed," if with_images else "tokenised"
        return Bottleneck(
            "preprocessing",
            f"{waits['preparing']:.0%} of the engine's places were empty although rows were waiting: prompts are"
            f" {what} there on one thread, too slowly",
        )
    if waits["kv_cache"] > _MOSTLY:
        return Bottleneck(
            "kv-cache",
            f"the KV cache was full for {waits['kv_cache']:.0%} of the time, and {best['running']:.0f} of"
            f" {best['batch_size']:,} requests ran at once: more memory for it, or a smaller"
            " max_model_len, would let more of them run",
        )
    return _compute(lines, best)


def _compute(lines: Sequence[Line], best: Line) -> Bottleneck:
    """A row's time is ``a + b / batch``: ``b`` is for steps, which the rows of a batch share, and
    ``a`` is for its tokens, at any batch size. The share of ``b`` shows whether steps dominate.
    Pooling tasks have no output tokens: all their steps are prefill."""
    prompt, output = best["prompt_tokens_per_s"], best["completion_tokens_per_s"]
    if not prompt or output is None:
        return Bottleneck("unknown", "the engine did not count its tokens")
    tokens = f"{prompt:,.0f} prompt and {output:,.0f} output tokens/s"
    shared = _shared_by_batch(lines, best)
    if shared >= 0.5:
        return Bottleneck(
            "decode" if output else "prefill",
            f"{shared:.0%} of a row's time is steps that the batch shares, and a larger batch would"
            f" still make it shorter ({tokens})",
        )
    if prompt > output:
        return Bottleneck("prefill", f"most tokens are the prompts' ({tokens})")
    return Bottleneck("decode", f"most tokens are the answers' ({tokens})")


def _shared_by_batch(lines: Sequence[Line], best: Line) -> float:
    """Compares ``best`` with the largest clearly smaller size; 0 if there is none."""
    size, best_s = best["batch_size"], 1 / best["rows_per_s"]
    smaller = [
        line for line in lines if line["rows_per_s"] and size >= _LEAST_GROWTH * line["batch_size"]
    ]
    if not smaller:
        return 0.0
    other = max(smaller, key=lambda line: line["batch_size"])
    b = (1 / other["rows_per_s"] - best_s) / (1 / other["batch_size"] - 1 / size)
    share: float = b / size / best_s
    return min(1.0, max(0.0, share))
