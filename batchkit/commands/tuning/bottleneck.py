"""Finds the bottleneck of a job from its measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from batchkit.commands.trial import seconds_at
from batchkit.commands.tuning.rounds import Rounds
from batchkit.commands.tuning.table import Idle, SizeResult
from batchkit.config.numbers import number
from batchkit.execution.window import KV_CACHE_FULL
from batchkit.storage.metrics import Metrics

_MOSTLY = 0.2  # an engine of which a larger share waits is waiting too long
_TIED = 1.1
_LEAST_STEADY_S = 0.5
_LEAST_GROWTH = 1.5  # of the batch, for two trials to show what a larger one gains


class Bottleneck(NamedTuple):
    """``reason`` is one sentence with the figures."""

    resource: Literal["rendering", "preprocessing", "kv-cache", "decode", "prefill", "unknown"]
    reason: str


class Rendered(NamedTuple):
    """How fast rows are rendered for an engine that answers at once; ``per_s`` is 0 if none can be."""

    per_s: float
    with_images: bool


def idle_of(rounds: Rounds, metrics: Sequence[Metrics]) -> Idle | None:
    """What kept places of the engine empty; None if it was steady for too short a time to judge."""
    steady = rounds.steady
    if steady is None or steady.seconds < _LEAST_STEADY_S:
        return None
    lines = [line for line in metrics if steady.since.at <= seconds_at(line.at) <= steady.until.at]
    if not lines:
        return None
    places = rounds.batch_size
    # By Little's law, in its queue or running; the others in flight are being prepared for that.
    held = sum(answer.latency_s for answer in steady.of(rounds.answers)) / steady.seconds
    preparing = sum(line.in_flight for line in lines) / len(lines) - held
    empty = max(0.0, places - held)
    preparing = min(empty, max(0.0, preparing))
    return Idle(
        rendering=(empty - preparing) / places,
        preparing=preparing / places,
        kv_cache=sum(line.kv_cache_usage >= KV_CACHE_FULL for line in lines) / len(lines),
        running=sum(line.running for line in lines) / len(lines),
        preempted=lines[-1].preemptions - lines[0].preemptions,
    )


def bottleneck_of(lines: Sequence[SizeResult], best: SizeResult, rendered: Rendered) -> Bottleneck:
    """The bottleneck at the ``best`` size; ``lines`` are all sizes tried."""
    what = "images are opened and prompts rendered" if rendered.with_images else "prompts rendered"
    idle, rate = best.idle, best.rows_per_s or 0.0
    if idle is not None and idle.rendering > _MOSTLY:
        return Bottleneck(
            "rendering",
            f"{idle.rendering:.0%} of the engine's places were empty because no row was ready:"
            f" {what} at {number(rendered.per_s)} rows/s alone, the engine took {number(rate)} rows/s",
        )
    if idle is not None and idle.preparing > _MOSTLY:
        with_pixels = ", and images preprocessed" if rendered.with_images else ""
        return Bottleneck(
            "preprocessing",
            f"{idle.preparing:.0%} of the engine's places were empty although rows were waiting:"
            f" prompts are tokenised{with_pixels} there on one thread, too slowly",
        )
    if 0 < rendered.per_s < _TIED * rate:
        return Bottleneck(
            "rendering",
            f"{what} at {number(rendered.per_s)} rows/s with no engine beside, and the engine answers"
            f" {number(rate)} rows/s: a faster one would wait",
        )
    if idle is not None and idle.kv_cache > _MOSTLY:
        return Bottleneck(
            "kv-cache",
            f"the KV cache was full for {idle.kv_cache:.0%} of the time, and {idle.running:.0f} of"
            f" {best.batch_size:,} requests ran at once: more memory for it, or a smaller"
            " max_model_len, would let more of them run",
        )
    return _compute(lines, best)


def _compute(lines: Sequence[SizeResult], best: SizeResult) -> Bottleneck:
    """A row's time is ``a + b / batch``: ``b`` is for steps, which the rows of a batch share, and
    ``a`` is for its tokens, at any batch size. The share of ``b`` shows whether steps dominate.
    Pooling tasks have no output tokens: all their steps are prefill."""
    prompt, output = best.median("prompt_tokens_per_s"), best.median("completion_tokens_per_s")
    if not prompt or output is None:
        return Bottleneck("unknown", "the engine did not count its tokens")
    tokens = f"{prompt:,.0f} prompt and {output:,.0f} output tokens/s"
    shared = _shared_by_batch(lines, best)
    if shared is not None and shared >= 0.5:
        return Bottleneck(
            "decode" if output else "prefill",
            f"{shared:.0%} of a row's time is steps that the batch shares, and a larger batch would"
            f" still make it shorter ({tokens})",
        )
    why = "too few sizes were tried to distinguish steps from tokens"
    if shared is not None:
        why = f"only {shared:.0%} of a row's time is steps that a larger batch would share"
    if prompt > output:
        return Bottleneck("prefill", f"{why}, and most tokens are the prompts' ({tokens})")
    return Bottleneck("decode", f"{why}, and most tokens are the answers' ({tokens})")


def _shared_by_batch(lines: Sequence[SizeResult], best: SizeResult) -> float | None:
    """Compares ``best`` with the largest clearly smaller size; None if there is none."""
    smaller = [ln for ln in lines if ln.rounds and best.batch_size >= _LEAST_GROWTH * ln.batch_size]
    if not smaller:
        return None
    other = max(smaller, key=lambda line: line.batch_size)
    best_s, other_s = 1 / (best.rows_per_s or 1), 1 / (other.rows_per_s or 1)
    b = (other_s - best_s) / (1 / other.batch_size - 1 / best.batch_size)
    return min(1.0, max(0.0, b / best.batch_size / best_s))
