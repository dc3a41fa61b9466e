"""What a worker reports while it works: one value for each thing that happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple


class Line(NamedTuple):
    """A line for the terminal and ``run.log``."""

    text: str


class EngineLine(NamedTuple):
    """A line about an engine or a worker: ``status`` shows it, too."""

    text: str


class Note(NamedTuple):
    """A text too long for a line, for ``run.log`` only."""

    text: str


class EngineHistory(NamedTuple):
    """What earlier deaths of engines taught; the next start of the run needs it.

    ``steps``: the memory ladder's. ``engine``: the name of one of ``[engines]``, "" for ``[engine]``.
    """

    restarts: int = 0
    steps: Sequence[Mapping[str, Any]] = ()
    engine: str = ""


class Found(NamedTuple):
    """What an engine was found to run: by a key of the run's identity, each by name."""

    found: Mapping[str, Mapping[str, Any]]


class Load(NamedTuple):
    """How busy engines are, as of their last poll: summed over several, but for ``kv_cache_usage``, the
    fullest one's. ``preemptions`` are counted since the start, and so are ``retried``, further attempts
    of rows. ``unfinished_tokens`` are of answers that have not ended. ``trouble``: an engine's."""

    window: int = 0
    in_flight: int = 0
    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0
    preemptions: int = 0
    unfinished_tokens: int = 0
    retried: int = 0
    trouble: str = ""

    def __add__(self, other: Load) -> Load:  # type: ignore[override]
        fullest = max(self.kv_cache_usage, other.kv_cache_usage)
        pairs: Iterator[tuple[Any, Any]] = zip(self, other, strict=True)
        summed = Load(*(mine + its for mine, its in pairs))
        return summed._replace(kv_cache_usage=fullest, trouble=self.trouble or other.trouble)


Event = Line | EngineLine | Note | EngineHistory | Found
Hear = Callable[[Event], None]
