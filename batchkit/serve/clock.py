"""The server's clock. It reads the machine's time once at the start and then never jumps.

If the machine's clock were set forward and back, a server using it would expire all batches and remove all files.
"""

from __future__ import annotations

import time

_AT_BOOT = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def wall_s() -> int:
    """Return seconds since 1970."""
    return int(_AT_BOOT + time.clock_gettime(time.CLOCK_BOOTTIME))
