"""The server's clock. It reads the machine's time once at the start, and from then on only counts seconds.

If somebody set the machine's clock forward and back, a server that used it would expire all batches and files.
"""

from __future__ import annotations

import time

_AT_BOOT = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def wall_s() -> int:
    """Return the current time in seconds since 1970."""
    return int(_AT_BOOT + time.clock_gettime(time.CLOCK_BOOTTIME))
