"""``engine.log``: what engines and their launcher print, in order and with a bounded size.

Processes open it for appending, so it can be shortened while they print.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from batchkit.storage.files import open_log

MOST_BYTES = 32 * 2**20
KEPT_BYTES = 4 * 2**20
_LAST_BYTES = 65536  # dumps of many threads must fit
_NOTICE = b"[batchkit: engine.log was cut here, to its last %d MiB]\n" % (KEPT_BYTES // 2**20)


class EngineLog:
    """The log of one engine: everything printed after this object was created belongs to it.

    One thread of one process cuts it; a line that is printed at that moment may be lost.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start = self.size()

    def size(self) -> int:
        """In bytes; 0 if the file does not exist."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def read(self, start: int) -> str:
        """Its content from ``start`` on; empty if the file was removed."""
        try:
            with self.path.open("rb") as file:
                file.seek(start)
                return file.read().decode("utf-8", "replace")
        except OSError:
            return ""

    def printed(self) -> str:
        """The last part of what this engine printed."""
        return self.read(max(self._start, self.size() - _LAST_BYTES))

    def trim(self) -> None:
        """If it is larger than ``MOST_BYTES``, keep its last ``KEPT_BYTES``. Cheap otherwise."""
        size = self.size()
        if size <= MOST_BYTES:
            return
        with contextlib.suppress(OSError):  # removed, or the disk is full: then less is kept
            with self.path.open("rb") as file:
                file.seek(size - KEPT_BYTES)
                kept = file.read(KEPT_BYTES).partition(b"\n")[2]
            os.truncate(self.path, 0)
            cut = size - len(kept) - len(_NOTICE)  # everything moved by this much
            self._start = max(0, self._start - cut)
            with open_log(self.path) as file:
                file.write(_NOTICE + kept)
