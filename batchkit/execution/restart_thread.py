"""A thread for the restart of one engine among several, so that the run's thread can serve the others."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait

from batchkit.errors import EngineError
from batchkit.execution.events import Event, Hear


class RestartThread:
    """Restarts one engine in a daemon thread, and keeps its events for the run's thread.

    ``hear``: receives the events when ``report`` is called.
    """

    def __init__(self, hear: Hear) -> None:
        self._hear, self._events = hear, deque[Event]()
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

    def close(self) -> None:
        """Let a restart end as soon as possible: ``check_open`` raises from now on."""
        self._is_closed = True

    def check_open(self) -> None:
        if self._is_closed:
            raise EngineError("the run has ended")

    def _work(self, restart: Callable[[], None], result: Future[None]) -> None:
        try:
            restart()
        except BaseException as error:  # ``finish`` raises it in the run's thread
            result.set_exception(error)
        else:
            result.set_result(None)
