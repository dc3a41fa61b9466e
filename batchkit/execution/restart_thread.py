"""Engines that share a GPU: a thread restarts one of them, and they take turns to search for poison rows."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait

from batchkit.errors import EngineError
from batchkit.execution.events import Event, Hear

_END_S = 60.0


class SearchTurn:
    """The turn of the engines on one GPU to replay suspects.

    Under MPS, a fatal GPU fault of one engine ends all engines on this GPU. If two of them replayed suspects at the
    same time, an innocent row would die together with a poison row.
    """

    def __init__(self) -> None:
        self._holder: object = None

    def take(self, engine: object) -> bool:
        """Return whether ``engine`` has the turn now."""
        if self._holder is None:
            self._holder = engine
        return self._holder is engine

    def give_up(self, engine: object) -> None:
        if self._holder is engine:
            self._holder = None


class RestartThread:
    """Restarts one engine in a daemon thread, and keeps its events for the run's thread.

    - ``hear``: receives the events when ``report`` is called.
    - ``turn``: the turn that the engines on this GPU share.
    """

    def __init__(self, hear: Hear, turn: SearchTurn) -> None:
        self._hear, self._events = hear, deque[Event]()
        self.turn = turn
        self._restart: Future[None] | None = None
        self._is_closed = False

    @property
    def is_working(self) -> bool:
        return self._restart is not None

    def hear(self, event: Event) -> None:
        """Keep an event. Any thread may call this."""
        self._events.append(event)

    def report(self) -> None:
        """Pass on the events that were kept."""
        while self._events:
            self._hear(self._events.popleft())

    def wait(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` for the end of the restart."""
        if self._restart is not None:
            wait([self._restart], timeout_s)

    def finish(self, restart: Callable[[], None]) -> bool:
        """Begin ``restart`` at the first call, and return whether it has ended. Raise its error once."""
        if self._restart is None:
            self._restart = Future()
            threading.Thread(target=self._work, args=(restart, self._restart), daemon=True).start()
        if not self._restart.done():
            return False
        done, self._restart = self._restart, None
        done.result()
        return True

    def stop(self, cancel: Callable[[], None]) -> None:
        """Let no restart begin, and end the present one. ``cancel`` kills the process that loads the engine."""
        self._is_closed = True
        if self._restart is not None and not self._restart.done():
            cancel()
            self.wait(_END_S)

    def check_open(self) -> None:
        """Raise EngineError if the engine was stopped."""
        if self._is_closed:
            raise EngineError("the run has ended")

    def _work(self, restart: Callable[[], None], result: Future[None]) -> None:
        try:
            restart()
        except BaseException as error:  # ``finish`` raises it in the run's thread
            result.set_exception(error)
        else:
            result.set_result(None)
