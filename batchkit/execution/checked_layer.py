"""The checks around a layer of another package."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from batchkit.config.seams import LAYERS
from batchkit.engines.outstanding import Outstanding
from batchkit.errors import BatchkitError, EngineError, Interrupted
from batchkit.execution.engine_layer import EngineLayer
from batchkit.execution.events import Hear, Load, Note
from batchkit.types import Completion, Request


class CheckedLayer(EngineLayer):
    """The layer ``name`` of the job's ``engine.layers``, directly below this object.

    An exception of the layer, and a request that does not come back exactly once, becomes an EngineError that names the
    layer. ``below``: the layer below it.
    """

    def __init__(
        self, name: str, parameters: Mapping[str, Any], below: EngineLayer, hear: Hear
    ) -> None:
        self._key, self._hear = f"engine.layers.{name}", hear
        duty = "a layer that holds some counts them in its property `unanswered`"
        self._open = Outstanding(self._key, duty)
        with self._named_faults():
            super().__init__(LAYERS.load(name)(below, **parameters))

    @property
    def room(self) -> int:
        with self._named_faults():
            return self.below.room

    def submit(self, request: Request) -> None:
        self._open.add(request)
        with self._named_faults():
            self.below.submit(request)

    def resubmit(self) -> None:
        with self._named_faults():
            self.below.resubmit()

    def poll(self, timeout_s: float) -> Sequence[Completion]:
        with self._named_faults():
            done = self.below.poll(timeout_s)
            self._open.take_back(done)
            if self._open and not done and not self.below.unanswered:
                raise self._open.lost
        return done

    @property
    def load(self) -> Load:
        with self._named_faults():
            return self.below.load

    @contextmanager
    def _named_faults(self) -> Iterator[None]:
        try:
            yield
        except (BatchkitError, Interrupted):
            raise
        except Exception as error:
            self._hear(Note(traceback.format_exc()))
            raise EngineError(
                f"{self._key}: {type(error).__name__}: {error}; run.log has the traceback"
            ) from error
