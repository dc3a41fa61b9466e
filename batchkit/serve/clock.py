"""The server's clock. It reads the machine's time once at the start; from then on it only counts seconds and never
jumps.

With a clock that somebody sets forward and back, the server would expire all batches and remove all files.
"""

from __future__ import annotations

import time

_AT_BOOT = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def wall_s() -> int:
    """Return the current time in seconds since 1970."""
    return int(_AT_BOOT + time.clock_gettime(time.CLOCK_BOOTTIME))
