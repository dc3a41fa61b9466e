"""The handler that matches regular expressions with Python's ``re``.

The kernel kills the process if a match needs more than ``TIMEOUT_S`` of CPU time. Nothing else can
interrupt ``re``: ``(\\w+\\s?)+$`` takes hours for only 40 characters.
"""

from __future__ import annotations

import marshal
import re
import signal
from collections import deque
from multiprocessing.connection import Connection

from batchkit.isolation.child import answer_all, limit_memory

TIMEOUT_S = 2.0
MEMORY_BYTES = 2 << 30


def main(connection: Connection) -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the default action ends the process
    limit_memory(MEMORY_BYTES)
    answer_all(connection, _last_in)


def _last_in(question: bytes) -> str | None:
    """Return the last match of a pattern in a text. If the pattern has groups, return the first group of this match."""
    pattern, text = marshal.loads(question)
    signal.setitimer(signal.ITIMER_PROF, TIMEOUT_S)
    try:
        last = deque(re.finditer(pattern, text), maxlen=1)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    found: list[str | None] = [match[1 if match.re.groups else 0] for match in last]
    return found[0] if found else None
