"""The seconds that loading a model takes, on the screen while they pass."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import IO, Any

from tqdm.auto import tqdm

from batchkit.config.numbers import duration

_INTERVAL_S = 1.0


class LoadClock:
    """Shows ``text`` and the seconds since, on a thread of its own, until it is closed; then the line
    is gone. What is written meanwhile goes through ``bar``, which draws for one thread at a time.
    """

    def __init__(self, text: str, stream: IO[str]) -> None:
        self._text = text
        self._started = time.monotonic()
        self._closed = threading.Event()
        self.bar: tqdm[Any] = tqdm(
            desc=text, bar_format="{desc}", file=stream, leave=False, dynamic_ncols=True
        )
        self._thread = threading.Thread(target=self._tick, name="load-clock", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        with suppress(OSError):  # the terminal was closed
            self.bar.close()

    def _tick(self) -> None:
        with suppress(OSError):
            while not self._closed.wait(_INTERVAL_S):
                seconds = duration(time.monotonic() - self._started)
                self.bar.set_description_str(f"{self._text}, {seconds}")
