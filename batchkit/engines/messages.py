"""What an engine's process tells its parent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from batchkit.engines.base import EngineLoad
from batchkit.errors import BatchkitError, RowError
from batchkit.faults import Fault
from batchkit.types import Choice, Usage


class Ready(NamedTuple):
    """The model is loaded."""

    max_num_seqs: int
    versions: Mapping[str, str]


class Refused(NamedTuple):
    """The engine could not be opened."""

    error: BatchkitError
    fault: Fault


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
    rss_bytes: int


class Died(NamedTuple):
    """The engine failed; nothing follows."""

    fault: Fault
