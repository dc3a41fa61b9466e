"""The interfaces of an engine: ``Engine`` for a lane, ``Preflight`` for what checks requests before a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from batchkit.types import Completion, Request

# How long an idle engine waits for the next request of a burst, so that all of them start together:
# many times what a text prompt takes to arrive and be prepared, less than an image takes.
BURST_GAP_S = 0.003


class EngineLoad(NamedTuple):
    """How busy the engine was in its last step, and the memory that its process uses."""

    running: int
    waiting: int
    kv_cache_usage: float
    preempted: int
    """Requests preempted since the last call of ``load``."""
    host_bytes: int = 0
    """Resident memory of the engine's process; 0 if it is unknown or not limited."""
    events: Sequence[str] = ()
    """Messages for the run to report, since the last call of ``load``."""
    served: Mapping[str, Any] = {}
    """What a server has said so far of the model that it serves."""
    unfinished_tokens: int = 0
    """Of the answers that have not ended; 0 if the engine does not count them."""
    trouble: str = ""
    """What a server answers instead, if it has answered no request for some seconds."""


class Engine(Protocol):
    """Answers requests in any order. Called by one thread at a time.

    Every submitted request comes back from ``poll`` exactly once, a failed one with ``error`` set, or at most once
    if it was aborted, unless EngineDied is raised: then the engine is dead and no more requests come back.
    """

    @property
    def max_num_seqs(self) -> int:
        """How many requests it runs at once; the others wait in its queue."""

    @property
    def limits(self) -> Mapping[str, Any]:
        """The options in force that decide its memory use, by vLLM's names."""

    @property
    def versions(self) -> Mapping[str, str]:
        """Names and versions of the software that its answers depend on, for the manifest."""

    def submit(self, request: Request) -> None:
        """Queue ``request`` and return at once."""

    def poll(self, timeout_s: float) -> Sequence[Completion]:
        """What finished since the last call; waits up to ``timeout_s`` for the first, may be empty.

        Raises:
            EngineDied: the engine died; the error says why.
            EngineError: it failed, and a new engine would fail, too.
        """

    def abort(self, requests: Sequence[Request]) -> None:
        """Nobody waits for these any more: stop computing them, if the engine can."""

    def load(self) -> EngineLoad:
        """How busy it is. Cheap to call."""

    def close(self) -> None:
        """Drop the requests in flight and release all resources. May be called twice."""


class RenderedPrompt(NamedTuple):
    """A prompt as the engine would get it, special tokens included.

    ``prompt_tokens`` is None if only the engine itself can count them.
    """

    text: str | None
    prompt_tokens: int | None


class Preflight(Protocol):
    """Renders and checks requests as the engine would, without the model's weights."""

    def render(self, request: Request) -> RenderedPrompt:
        """The prompt that the engine would get. Raises RowError if the engine would refuse the request."""
