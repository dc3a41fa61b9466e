"""The server's clock. It reads the machine's time once at the start, and then only adds the seconds since the start.

A server that used the machine's clock would expire all batches and files if someone set that clock forward.
"""

from __future__ import annotations

import time

_AT_BOOT = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def wall_s() -> int:
    """Return the current time in seconds since 1970."""
    return int(_AT_BOOT + time.clock_gettime(time.CLOCK_BOOTTIME))
