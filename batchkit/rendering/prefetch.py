"""A queue of rows that threads render ahead of the engine. It limits the number of rows and the size of their decoded
pixels."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Generic, TypeVar

from batchkit.rendering.held_media import HeldMedia
from batchkit.types import Request, Task

AHEAD = 256  # maximum number of rendered requests that wait to be submitted
READ_AT_ONCE = 16
_READ_AHEAD = 1024

Given = TypeVar("Given")
Made = TypeVar("Made")

_SLOW_S = 0.05  # if rendering took longer, a thread reads only one row next
_CLOSE_S = 5.0


def _pixel_bytes(made: object) -> int:
    return made.media_bytes if isinstance(made, Request) else 0


def read_ahead(
    tasks: Iterator[Task],
    *,
    max_bytes: int,
    may_wait: bool,
    weigh: Callable[[Task], int] = lambda task: 0,
) -> Prefetch[Task, Task]:
    """Return a Prefetch that only reads ``tasks`` ahead and renders nothing. It uses a thread, because reading the
    input may block.

    - ``may_wait``: True if the input may pause between rows. Each row is then returned as soon as it is read.
    - ``max_bytes``: limit for the total size of the tasks that are not released yet. ``weigh`` returns a task's size.
    """
    return Prefetch(
        tasks,
        lambda task: task,
        threads=1,
        ahead=_READ_AHEAD,
        held=HeldMedia(max_bytes),
        at_once=1 if may_wait else READ_AT_ONCE,
        weigh=weigh,
    )


class Prefetch(Generic[Given, Made]):
    """A queue of rows that several threads render ahead of the engine. Rows may leave the queue in another order, so
    that a slow image delays no other row.

    A thread does not begin another row

    - while ``ahead`` rendered rows wait in the queue;
    - while the decoded pixels of requests that are not released yet reach the limit of ``held``.

    Each limit is exceeded by at most one row per thread, because a thread checks it only before it begins. If rows have
    no images, the first limit is exceeded by up to ``at_once`` rows per thread.

    ``threads`` render threads each read up to ``at_once`` rows under the lock ``_reading``, and then render these rows
    without it. If rows have images or are slow, a thread reads one row at a time, because its other rows would have to
    wait. The worker's thread calls ``get`` and ``release``. ``_changed`` guards all other attributes.
    """

    def __init__(
        self,
        rows: Iterator[Given],
        render: Callable[[Given], Made],
        *,
        threads: int,
        ahead: int,
        held: HeldMedia,
        at_once: int = 1,
        weigh: Callable[[Made], int] = _pixel_bytes,
    ) -> None:
        self._rows = rows
        self._render = render
        self._ahead = ahead
        self._at_once = at_once
        self._weigh = weigh
        self._reading = threading.Lock()
        self._changed = threading.Condition()
        self._ready: deque[Made] = deque()
        self._held = held
        self._working = threads
        self._stopped = False
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._work, name=f"render-{n}", daemon=True)
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def get(self, timeout_s: float) -> Made | None:
        """Return the next rendered row, or None after ``timeout_s``.

        A row that can't be rendered is returned as a Completion with its error. If reading the input failed, this error
        is raised after all rows read before it were returned.
        """
        with self._changed:
            if not self._ready and timeout_s > 0:
                self._changed.wait_for(lambda: self._ready or not self._working, timeout_s)
            if self._ready:
                rendered = self._ready.popleft()
                self._changed.notify_all()
                return rendered
            if self._error is not None and not self._working:
                raise self._error
            return None

    @property
    def exhausted(self) -> bool:
        """True once every row was returned by ``get``."""
        with self._changed:
            return not self._ready and not self._working and self._error is None

    @property
    def all_read(self) -> bool:
        """True once all rows were read and rendered."""
        return not self._working

    @property
    def will_raise(self) -> bool:
        """True if reading the input failed and ``get`` has returned all earlier rows, so that the next ``get`` raises
        the error."""
        with self._changed:
            return self._error is not None and not self._ready and not self._working

    def release(self, made: Made) -> None:
        """Stop counting the pixels of a row towards the limit, so that other rows can begin. Call this when the pixels
        are no longer needed."""
        if n_bytes := self._weigh(made):
            with self._changed:
                self._held.free(n_bytes)
                self._changed.notify_all()

    def close(self) -> None:
        """Stop the threads; the rows that they hold are dropped."""
        with self._changed:
            self._stopped = True
            self._held.close()
            self._changed.notify_all()
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        try:
            wanted = 1
            while self._begin_next():
                if not (rows := self._read(wanted)):
                    self._hand_out([])
                    return
                rendered, began = list[Made](), time.monotonic()
                for row in rows:
                    rendered.append(self._render(row))
                    if self._stopped:
                        return
                is_slow = time.monotonic() - began > _SLOW_S
                wanted = 1 if self._hand_out(rendered) or is_slow else self._at_once
                # Without `del`, the pixels of these rows would stay in memory until the next row is rendered.
                del row, rows, rendered
        except BaseException as error:  # get() raises it in its caller's thread
            self._error = self._error or error
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()

    def _hand_out(self, rendered: list[Made]) -> int:
        """Put rendered rows into the queue, and return the number of bytes of pixels that they hold."""
        n_bytes = sum(map(self._weigh, rendered))
        with self._changed:
            if not self._stopped:
                self._held.end(n_bytes)
            self._ready.extend(rendered)
            self._changed.notify_all()
        return n_bytes

    def _read(self, wanted: int) -> list[Given]:
        """Read up to ``wanted`` rows. Return an empty list at the end of the input. If reading fails, return the rows
        read before the error."""
        rows: list[Given] = []
        with self._reading:
            try:
                rows.extend(islice(self._rows, wanted))
            except Exception as error:
                self._error = self._error or error
        return rows

    def _begin_next(self) -> bool:
        """Wait until the limits allow another row, and count this row as begun. Return False if the thread must end."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._stopped
                    or self._error is not None
                    or (len(self._ready) < self._ahead and not self._held.is_full)
                )
            )
            self._held.begin()
            return not self._stopped and self._error is None
