"""Feeds an engine: rendered rows go in while there is room, settled completions come out.

A run's Worker, and the trials of ``find-bs`` and ``bench``, call ``fill`` and ``poll`` in turn.
"""

from __future__ import annotations

import time
from typing import Protocol

from batchkit.config.tables import JobConfig
from batchkit.engines.base import Engine
from batchkit.execution.attempts import Attempts
from batchkit.execution.records import failed_unless_whole, parsed_or_failed
from batchkit.execution.selection import Selection
from batchkit.execution.window import Window
from batchkit.types import Completion, Key, Request

POLL_S = 0.05
AHEAD = 256  # requests that wait to be submitted


class Rendered(Protocol):
    """Where requests come from: a ``Prefetch`` of rendered rows, or ``Rollouts``."""

    def get(self, timeout_s: float) -> Request | Completion | None: ...

    def release(self, request: Request, /) -> None: ...

    @property
    def exhausted(self) -> bool: ...

    @property
    def broken(self) -> bool: ...


class Feeder:
    """Every request of ``prefetch`` comes back once, as the completion that settled it.

    ``in_flight`` holds the requests that the engine works on. ``selection`` chooses among several
    answers. Used by one thread.
    """

    def __init__(
        self,
        job: JobConfig,
        engine: Engine,
        prefetch: Rendered,
        attempts: Attempts,
        selection: Selection | None = None,
    ) -> None:
        fixed = job.run.max_in_flight
        self._engine = engine
        self._prefetch = prefetch
        self._attempts = attempts
        self._output = job.output
        self._parsing = job.parsing
        self._selection = selection or Selection(job)
        self.window = Window(engine.max_num_seqs, fixed=None if fixed == "auto" else fixed)
        self.in_flight: dict[Key, Request] = {}

    def fill(self) -> list[Completion]:
        """Submit rendered rows while there is room; wait only if the engine has nothing to do.

        Returns rows that could not be rendered. Bounded, so that many of them reach the disk along
        the way.
        """
        settled: list[Completion] = []
        for _ in range(AHEAD):
            if len(self.in_flight) >= self.window.size:
                break
            if settled and self._prefetch.broken:
                break  # the error is raised once these are written
            rendered = self.next_rendered()
            if rendered is None:
                break
            if isinstance(rendered, Completion):
                settled += self.settle(rendered)
            else:
                self._engine.submit(rendered)
                self.in_flight[rendered.key] = rendered
        return settled

    def poll(self, timeout_s: float = POLL_S) -> list[Completion]:
        """The rows that the engine has finished, after a wait of at most ``timeout_s`` for the first."""
        settled: list[Completion] = []
        if self.in_flight:
            for completion in self._engine.poll(timeout_s):
                del self.in_flight[completion.request.key]
                settled += self.settle(completion)
        elif self._attempts:
            time.sleep(timeout_s)  # all remaining rows wait for their next attempt
        return settled

    @property
    def has_more(self) -> bool:
        """True while there are rows to submit."""
        return bool(self._attempts) or not self._prefetch.exhausted

    @property
    def is_done(self) -> bool:
        """True once every row has come back."""
        return not self.in_flight and not self.has_more

    @property
    def retried(self) -> int:
        """Further attempts so far."""
        return self._attempts.retried

    def next_rendered(self) -> Request | Completion | None:
        """What to submit next, or a row that could not be rendered; None if neither is ready."""
        if (again := self._attempts.pop_due()) is not None:
            return again
        if self.in_flight and self._prefetch.broken:
            return None  # what is in flight is paid for: settle it before the error is raised
        return self._prefetch.get(timeout_s=0 if self.in_flight else POLL_S)

    def put_back(self, request: Request) -> None:
        """Submit ``request``, which ``next_rendered`` has returned, at the next ``fill``."""
        self._attempts.put_back(request)

    def settle(self, completion: Completion) -> list[Completion]:
        """The completion that settles the request; nothing if it is tried again."""
        if completion.generations is not None:  # the outcome of a row, whose requests were settled
            return [completion]
        parses = completion.request.step in self._parsing
        chosen = self._selection.chosen(completion, parses=parses)
        whole = failed_unless_whole(chosen, self._output.vector_dtype)
        settled = self._attempts.settle(parsed_or_failed(whole) if parses else whole)
        if settled is None:
            return []
        self._prefetch.release(settled.request)
        return [settled]
