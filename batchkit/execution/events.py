"""Events that engines and workers report to the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple


class Message(NamedTuple):
    """A message of one line for the terminal and ``run.log``."""

    text: str


class EngineMessage(NamedTuple):
    """A message of one line about an engine or a worker. It is also kept in ``starts.jsonl`` for ``status``."""

    text: str


class Note(NamedTuple):
    """A text too long for a line, for ``run.log`` only."""

    text: str


class EngineHistory(NamedTuple):
    """The history of an engine: how often it was restarted after deaths, and which of its options were reduced.

    It is reported after each death and kept in ``starts.jsonl``, so that the next start begins with the reduced options.

    - ``reductions``: the changed options after each out-of-memory error (``engines/memory_ladder.py``).
    - ``engine``: name in ``[engines]``; "" for ``[engine]``.
    - ``number``: 1, 2, … among the engines with this name; 0 without ``workers.per_gpu``.
    """

    restarts: int = 0
    reductions: Sequence[Mapping[str, Any]] = ()
    engine: str = ""
    number: int = 0


class Found(NamedTuple):
    """Facts about a model that only the loaded engine knows. They become a part of the run's identity.

    ``found``: by identity key, then by name. ``engine.commits`` has hub commits by model name; ``engine.served`` has
    properties of the model that a server serves.
    """

    found: Mapping[str, Mapping[str, Any]]


class SelfChecked(NamedTuple):
    """The results of a self-check.

    - ``findings``: for each row computed again, its ``index`` and ``id``, and the fields of ``Verdict``
      (``runs/verdicts.py``).
    - ``seconds``: duration of the pause.
    """

    findings: Sequence[Mapping[str, Any]]
    seconds: float


class Load(NamedTuple):
    """The summed load of one or several engines at their last poll."""

    window: int = 0  # maximum number of requests in flight
    in_flight: int = 0  # requests submitted to the engines and not yet answered
    running: int = 0  # requests in flight that an engine computes
    waiting: int = 0  # requests in flight that wait in an engine's queue
    kv_cache_usage: float = 0.0  # share from 0 to 1; of several engines, the highest
    preemptions: int = 0  # since the start
    unfinished_tokens: int = 0  # output tokens of requests that still run
    retried: int = 0  # retries of rows since the start
    trouble: str = ""  # a server's error, or ""; with several engines, the first one
    drafts: int = 0  # drafts that speculative decoding checked since the start
    accepted_tokens: int = 0  # drafted tokens accepted since the start

    def __add__(self, other: Load) -> Load:  # type: ignore[override]
        fullest = max(self.kv_cache_usage, other.kv_cache_usage)
        pairs: Iterator[tuple[Any, Any]] = zip(self, other, strict=True)
        summed = Load(*(mine + its for mine, its in pairs))
        return summed._replace(kv_cache_usage=fullest, trouble=self.trouble or other.trouble)


Event = Message | EngineMessage | Note | EngineHistory | Found | SelfChecked
Hear = Callable[[Event], None]
