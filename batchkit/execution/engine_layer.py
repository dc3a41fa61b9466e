"""Layers between a lane and its engine.

Each layer takes requests from above and passes them to the layer below; completions come back the same way. All layers
have the interface of ``EngineLayer``, so another one can be put between two of them:

``Retry`` → layers of the job (``engine.layers``) → ``Windowed`` → ``SupervisedEngine`` → the engine

docs/plugins.md shows how a package adds a layer.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchkit.execution.events import Load
from batchkit.types import Completion, Request

LAYERS: dict[str, str] = {}
"""Layers for ``engine.layers`` that are built in, as ``"module:Name"`` by name."""


class EngineLayer:
    """A layer that changes nothing: it passes requests down and completions up. Subclasses override methods.

    Every request that was submitted must come back exactly once, as a completion. A layer may answer a request itself,
    or submit it to ``below`` again before it returns the completion. One thread uses a layer.

    A subclass that takes parameters in the job file has them as keyword-only arguments of ``__init__``.
    """

    def __init__(self, below: EngineLayer) -> None:
        self.below = below

    @property
    def room(self) -> int:
        """The number of further requests to submit now."""
        return self.below.room

    def submit(self, request: Request) -> None:
        """Take ``request``, and return immediately."""
        self.below.submit(request)

    def resubmit(self) -> None:
        """Submit waiting requests to the layer below if their time has come. It is not called while the run stops."""
        self.below.resubmit()

    def poll(self, timeout_s: float) -> Sequence[Completion]:
        """Return the completions since the last call. If there are none, wait up to ``timeout_s`` for one."""
        return self.below.poll(timeout_s)

    @property
    def load(self) -> Load:
        """The load of the engine, with the requests in the layers above it."""
        return self.below.load

    def close(self) -> None:
        """Release the resources of this layer and of the layers below."""
        self.below.close()
