"""What the processor asks of an engine, and what ``validate`` asks of its outer half."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from batchkit.types import Completion, Request

# So long an idle engine waits for the next request of a burst, so that all of it begins together:
# many times what a text prompt takes to arrive and be prepared, less than an image does.
BURST_GAP_S = 0.003


class EngineLoad(NamedTuple):
    """How busy the engine was in its last step, and the memory that its process holds."""

    running: int
    waiting: int
    kv_cache_usage: float
    preempted: int
    """Requests preempted since the load was last asked for."""
    host_bytes: int = 0
    """Resident memory of the process that the engine runs in; 0 where it is not known, or not limited."""
    events: Sequence[str] = ()
    """What the run should report since the load was last asked for."""


class Engine(Protocol):
    """Answers requests in any order. One thread calls it.

    Every submitted request comes back from ``poll`` exactly once, a failed one with ``error`` set,
    unless EngineDied is raised: then the engine is dead and nothing more comes back.
    """

    @property
    def max_num_seqs(self) -> int:
        """How many requests it runs at once; more than these wait in its queue."""

    @property
    def limits(self) -> Mapping[str, Any]:
        """The options that decide its memory, by vLLM's names, as they are in force."""

    @property
    def versions(self) -> Mapping[str, str]:
        """Names and versions that decide its answers, for the manifest."""

    def submit(self, request: Request) -> None:
        """Queue ``request`` and return at once."""

    def poll(self, timeout_s: float) -> Sequence[Completion]:
        """What has finished since; waits up to ``timeout_s`` for the first, may return nothing.

        Raises:
            EngineDied: it says why.
            EngineError: … and another engine would fare no better.
        """

    def load(self) -> EngineLoad:
        """How busy it is. Costs next to nothing."""

    def close(self) -> None:
        """Drop what is in flight and give everything back. May be called twice."""


class RenderedPrompt(NamedTuple):
    """A prompt as the engine would get it, special tokens and all.

    ``prompt_tokens`` is None where only the engine itself can count them.
    """

    text: str | None
    prompt_tokens: int | None


class Preflight(Protocol):
    """The engine's outer half: it renders and checks requests without the model's weights."""

    def render(self, request: Request) -> RenderedPrompt:
        """What the engine would get.

        Raises:
            RowError: the engine would refuse the request.
        """
