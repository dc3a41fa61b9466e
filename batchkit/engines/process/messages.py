"""Messages from an engine's process to its parent."""

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
    """The job is wrong: the message of a JobError."""

    message: str


class NotStarted(NamedTuple):
    """The engine did not start: the arguments of StartFailed."""

    message: str
    fault: Fault
    limits: Mapping[str, Any]


class Done(NamedTuple):
    """A Completion without its request, which the parent keeps under ``number``."""

    number: int
    choices: Sequence[Choice]
    usage: Usage | None
    latency_s: float
    error: RowError | None
    prompt: str | None


class Turn(NamedTuple):
    """What finished in one turn; also sent empty, twice a second, as a sign of life."""

    done: list[Done]
    load: EngineLoad


class Died(NamedTuple):
    """The engine died; nothing follows. ``number``: the request that killed it, if known."""

    fault: Fault
    number: int | None
