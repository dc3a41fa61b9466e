"""Layers between a lane and its engine.

Each layer takes requests from above and passes them to the layer below; completions come back the same way. All layers
have the interface of ``EngineLayer``, so another one can be put between two of them:

``Retry`` → ``Deduplicate`` → layers of the job (``engine.layers``) → ``SelfCheck`` → ``Windowed`` → ``SupervisedEngine``
→ the engine

docs/plugins.md shows how a package adds a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from batchkit.execution.events import Load
from batchkit.types import Completion, Request

LAYERS: dict[str, str] = {}
"""Layers for ``engine.layers`` that are built in, as ``"module:Name"`` by name."""


class EngineLayer:
    """A layer that changes nothing: it passes requests down and completions up. Subclasses override methods.

    Every request that was submitted must come back exactly once, as a completion. A layer may answer a request itself,
    or submit it to ``below`` again (``asked_again``) before it returns the completion. It then adds the tokens of the
    dropped answer to ``earlier_usage`` of the completion. ``Retry`` may submit a request with the same ``key`` again
    after it came back. A layer that still has requests or completions after ``poll`` counts them in ``unanswered``.

    A layer sees completions as the engine made them. ``Retry``, above it, then selects the choice, parses the answer,
    and turns blank or broken-off answers into errors. One thread uses a layer.

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
        """Submit requests that this layer holds back to the layer below if their time has come.

        It is not called while the run stops. Such requests are then dropped, because the run waits only for requests
        in flight.
        """
        self.below.resubmit()

    def poll(self, timeout_s: float) -> Sequence[Completion]:
        """Return the completions since the last call. Wait up to ``timeout_s`` for the first one."""
        return self.below.poll(timeout_s)

    @property
    def unanswered(self) -> int:
        """The number of requests that this layer and the layers below have taken and not returned.

        It is read after a ``poll`` that returned nothing. If it is 0 although some requests have not come back, this
        layer has lost them, and the run stops.
        """
        return self.below.unanswered

    @property
    def load(self) -> Load:
        """The load of the engine. ``retried`` also counts the retries of this layer and of the layers below."""
        return self.below.load

    def close(self) -> None:
        """Release the resources of this layer and of the layers below."""
        self.below.close()


def asked_again(request: Request, sampling: Mapping[str, Any]) -> Request:
    """Return ``request`` with other ``sampling`` and the number of its next attempt."""
    return replace(request, sampling=sampling, attempt=request.attempt + 1)
