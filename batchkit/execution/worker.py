"""A Worker: engines, and everything needed to make records of rows with them.

A run on one machine is one Worker, called by the run's own thread; with ``run.workers`` there is
one in each process that Ray starts (``cluster/``). The run's loop uses both in the same way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import chain
from typing import NamedTuple

from batchkit.config.loading import learn_secrets
from batchkit.execution.events import Line, Load
from batchkit.execution.lane import POLL_S, Lane, Opening
from batchkit.execution.requests import Requests
from batchkit.execution.rollouts.rollouts import PausedRow
from batchkit.execution.settle import SettledLine, to_line
from batchkit.execution.start import Start
from batchkit.storage.ledger import RecordLine
from batchkit.types import Completion, Record

_SHARED_POLL_S = POLL_S / 8  # of several engines, each waits while the others may have answers

Returned = SettledLine | PausedRow
"""What a worker returns: lines for the logs, and rows that another engine has to go on with."""


class EngineFacts(NamedTuple):
    """What engines report once their models are loaded: how many requests they run at once together, and
    the versions of each, by its name."""

    max_num_seqs: int
    versions: Mapping[str, Mapping[str, str]]


class Worker:
    """Makes lines for the logs of rows: every row comes back once, as its record or paused, and before that
    each of its generations, if it has several. One thread calls ``fill`` and ``poll`` in turn until
    ``is_done``. The models of its ``engines``, by name, are loaded in the constructor.

    Raises:
        JobError, EngineError: the model can't be loaded.
    """

    def __init__(
        self, start: Start, requests: Requests, engines: Sequence[str], opening: Opening
    ) -> None:
        learn_secrets(start.job)  # a worker on Ray is in a process of its own
        self._start, self._requests = start, requests
        self._hear = opening.hear
        self._unwritten = deque[Completion]()
        self._lanes: list[Lane] = []
        with ExitStack() as held:
            for name in engines:
                lane = Lane(start, name, requests, opening)
                held.enter_context(closing(lane))
                self._lanes.append(lane)
            self._held = held.pop_all()
        self.engine_facts = EngineFacts(
            sum(lane.max_num_seqs for lane in self._lanes),
            {lane.name: lane.versions for lane in self._lanes},
        )

    def fill(self, *, taking: bool = True) -> list[Returned]:
        """Submit requests while there is room, none if not ``taking``; returns what was settled by it."""
        settled = [] if taking else self._requests.ended()
        for lane in self._lanes if taking else ():
            if self._requests.broken and (settled or self.load.in_flight):
                break  # what the others have is paid for: write it before the error is raised
            settled += lane.fill()
        return [*self._lines(settled), *self._requests.paused()]

    def poll(self) -> list[Returned]:
        """What the engines have finished."""
        timeout_s = POLL_S if len(self._lanes) == 1 else _SHARED_POLL_S
        settled = chain.from_iterable(lane.poll(timeout_s) for lane in self._lanes)
        return [*self._lines(settled)]

    def written(self, count: int | None = None) -> None:
        """So many of the generations that were returned, or all, are in the ledger: their rows may
        ask further."""
        n_written = len(self._unwritten) if count is None else count
        self._requests.answer([self._unwritten.popleft() for _ in range(n_written)])

    @property
    def load(self) -> Load:
        return sum((lane.load for lane in self._lanes), Load())

    @property
    def is_done(self) -> bool:
        """True once every row has come back."""
        return all(lane.is_done for lane in self._lanes)

    def close(self) -> None:
        """Drop what is in flight and release all resources."""
        self._held.close()

    def _lines(self, settled: Iterable[Completion]) -> list[SettledLine]:
        return [self._line(completion) for completion in settled]

    def _line(self, completion: Completion) -> SettledLine:
        line = to_line(self._start, completion)
        if not isinstance(line, RecordLine):
            self._unwritten.append(completion)
        elif isinstance(line.record, Record) and line.record.unscored and completion.text.strip():
            self._hear(Line(f"row {line.record.id}: {line.record.unscored}; unscored"))
        return line
