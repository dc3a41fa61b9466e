"""The server's clock: the machine's at the start, which from then on doesn't jump.

A clock that is set forward, and soon set right, would else end all batches and remove all files.
"""

from __future__ import annotations

import time

_AT_BOOT = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def wall_s() -> int:
    """Seconds since 1970."""
    return int(_AT_BOOT + time.clock_gettime(time.CLOCK_BOOTTIME))
