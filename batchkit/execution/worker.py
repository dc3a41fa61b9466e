"""A Worker: engines, with everything needed to turn rows into records.

A run on one machine has one Worker, which the run's own thread calls. With ``workers.count``, each process that Ray
starts has a Worker (``cluster/``). The main loop uses ``Worker`` and ``RayPool`` in the same way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import groupby
from typing import NamedTuple

from batchkit.config.loading import learn_secrets
from batchkit.errors import BatchkitError
from batchkit.execution.completions import SettledLine, to_line
from batchkit.execution.deduplicate import Answers
from batchkit.execution.engine_pool import RunEngines
from batchkit.execution.events import Load, Message
from batchkit.execution.lane import POLL_S, Lane
from batchkit.execution.requests import Requests
from batchkit.execution.rollouts.rollouts import PausedRow
from batchkit.execution.start import Start
from batchkit.storage.ledger import RecordLine
from batchkit.types import Completion, Record

# For all engines together, since polling one delays the answers of the others.
_SHARED_POLL_S = POLL_S / 4
_AT_ONCE = 8  # requests that one of several equal engines gets before the next one

Returned = SettledLine | PausedRow
"""Lines for the logs, and rows that need another engine to continue."""


class EngineFacts(NamedTuple):
    """Facts that engines report after loading: the sum of ``max_num_seqs``, and versions by engine name."""

    max_num_seqs: int
    versions: Mapping[str, Mapping[str, str]]


class Worker:
    """Engines that turn rows into log lines.

    Every row is returned once, as its record or as paused. If a row has several generations, each of them is returned
    before the row's record. One thread calls ``fill`` and ``poll`` alternately until ``is_done``. The constructor loads
    the models.

    - ``opened``: the engines to load.
    - ``answers``: answers that equal requests can copy.
    - ``expected_s``: returns how many seconds the run is expected to take, without loading.

    Raises:
        JobError, EngineError: the model can't be loaded.
    """

    def __init__(
        self,
        start: Start,
        requests: Requests,
        opened: RunEngines,
        answers: Answers,
        expected_s: Callable[[], float],
    ) -> None:
        learn_secrets(start.job)  # a worker on Ray is another process, which must mask secrets, too
        self._start, self._requests = start, requests
        self._hear = opened.hear
        self._unwritten = deque[Completion]()
        self._failure: BatchkitError | None = None  # of a lane; raised at the next poll
        self._lanes: list[Lane] = []
        with ExitStack() as held:
            opened.prepare()
            for place in opened.places:
                lane = Lane(start, place, requests, opened, answers, expected_s)
                held.enter_context(closing(lane))
                self._lanes.append(lane)
            self._held = held.pop_all()
        self.engine_facts = EngineFacts(
            sum(lane.max_num_seqs for lane in self._lanes),
            {lane.name: lane.versions for lane in self._lanes},
        )

    def fill(self, *, taking: bool = True) -> list[Returned]:
        """Submit requests while there is room. Return rows that ended without an engine, and the outcomes of rows with
        several generations. ``taking``: False submits none, and ends self-checks."""
        for lane in () if taking else self._lanes:
            lane.stop_check()
        settled = [] if taking else self._requests.take_ended()
        for _, lanes in groupby(self._lanes if taking else (), lambda lane: lane.name):
            if self._requests.will_raise and (settled or self.load.in_flight):
                break  # ``lane.fill`` may raise the input's error: first finish and write running requests
            settled += self._fill([*lanes])
        return [*self._lines(settled), *self._requests.take_paused()]

    def poll(self) -> list[Returned]:
        """Return the lines of requests that the engines have finished since the last call."""
        if len(self._lanes) == 1:
            return self._lines(self._lanes[0].poll(POLL_S))
        n_busy = max(1, sum(lane.n_open > 0 or lane.is_checking for lane in self._lanes))
        for timeout_s in (0.0, _SHARED_POLL_S / n_busy):
            if settled := self._poll(timeout_s):
                return self._lines(settled)
        return []

    def _poll(self, timeout_s: float) -> list[Completion]:
        """Return the completions of all lanes. If a lane fails, first return the completions of the other lanes."""
        if self._failure is not None:
            raise self._failure
        settled = list[Completion]()
        for lane in self._lanes:
            try:
                settled += lane.poll(timeout_s)
            except BatchkitError as error:
                if not settled:
                    raise
                self._failure = error
        return settled

    def note_written(self, count: int | None = None) -> None:
        """Let rows continue, because their generations are in the ledger now.

        ``count``: how many of the returned generations were written, oldest first; None for all.
        """
        n_written = len(self._unwritten) if count is None else count
        self._requests.answer([self._unwritten.popleft() for _ in range(n_written)])

    @property
    def load(self) -> Load:
        return sum((lane.load for lane in self._lanes), Load())

    @property
    def is_done(self) -> bool:
        """True once every row has come back."""
        return all(lane.is_done for lane in self._lanes)

    def check(self) -> None:
        """Begin the self-check at the end of the run. Call it once, when every row has come back. Then call ``fill``
        and ``poll`` until ``is_checking`` is False."""
        for lane in self._lanes:
            lane.check()

    @property
    def is_checking(self) -> bool:
        """True while rows are computed again for the self-check."""
        return any(lane.is_checking for lane in self._lanes)

    def close(self) -> None:
        """Drop requests in flight and release all resources."""
        self._held.close()

    def _fill(self, lanes: Sequence[Lane]) -> list[Completion]:
        """Submit requests to lanes of one engine name, a few at a time to the one with the fewest, so that few rows are
        spread over all. Wait for a request only if no engine has anything to do."""
        timeout_s = 0 if any(lane.n_open for lane in self._lanes) else POLL_S
        if len(lanes) == 1:
            return lanes[0].fill(timeout_s)
        settled, open_lanes = list[Completion](), [*lanes]
        while open_lanes:
            if self._requests.will_raise and (settled or any(lane.n_open for lane in self._lanes)):
                break  # as in ``fill``
            lane = min(open_lanes, key=lambda lane: lane.n_open)
            before = lane.n_open
            settled += lane.fill(timeout_s, _AT_ONCE)
            timeout_s = 0
            if lane.n_open < before + _AT_ONCE:  # its window is full, or no request is ready
                open_lanes.remove(lane)
        return settled

    def _lines(self, settled: Iterable[Completion]) -> list[Returned]:
        return [self._line(completion) for completion in settled]

    def _line(self, completion: Completion) -> SettledLine:
        line = to_line(self._start, completion)
        if not isinstance(line, RecordLine):
            self._unwritten.append(completion)
        elif isinstance(line.record, Record) and line.record.unscored and completion.text.strip():
            self._hear(Message(f"row {line.record.id} is not scored: {line.record.unscored}"))
        return line
