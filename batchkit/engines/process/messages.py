"""What an engine's process tells its parent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from batchkit.engines.base import EngineLoad
from batchkit.engines.faults import Fault
from batchkit.errors import RowError
from batchkit.types import Choice, Usage


class Ready(NamedTuple):
    """The model is loaded."""

    limits: Mapping[str, Any]
    versions: Mapping[str, str]
    load: EngineLoad


class Refused(NamedTuple):
    """The job can't be right: the message of a JobError."""

    message: str


class NotStarted(NamedTuple):
    """The engine did not come up: what StartFailed is made of."""

    message: str
    fault: Fault
    limits: Mapping[str, Any]


class Done(NamedTuple):
    """A Completion without its request, which stays with the parent under ``number``."""

    number: int
    choices: Sequence[Choice]
    usage: Usage | None
    latency_s: float
    error: RowError | None
    prompt: str | None


class Turn(NamedTuple):
    """What finished in one turn; also sent twice a second without anything, as a sign of life."""

    done: list[Done]
    load: EngineLoad


class Died(NamedTuple):
    """The engine failed; nothing follows. ``number``: the request that it died of, if known."""

    fault: Fault
    number: int | None
