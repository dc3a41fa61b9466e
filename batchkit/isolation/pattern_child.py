"""The handler that matches regular expressions of Python's ``re``.

The kernel kills the process if a match takes more than ``TIMEOUT_S`` of its CPU time: nothing else can
stop ``re`` (``(\\w+\\s?)+$`` needs only 40 characters to take hours).
"""

from __future__ import annotations

import marshal
import re
import signal
from collections import deque
from multiprocessing.connection import Connection

from batchkit.isolation.child import Answer, answer_all, limit_memory

TIMEOUT_S = 2.0
MEMORY_BYTES = 2 << 30


def main(connection: Connection) -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process
    limit_memory(MEMORY_BYTES)
    answer_all(connection, _answer)


def _answer(question: bytes) -> Answer:
    """The ``marshal`` bytes of "value" and the last match, or of "error" and the reason."""
    signal.setitimer(signal.ITIMER_PROF, TIMEOUT_S)
    try:
        return _in_bytes("value", _last_in(*marshal.loads(question)))
    except MemoryError:
        return _in_bytes("error", f"needs more than {MEMORY_BYTES >> 30} GiB of memory")
    except Exception as error:  # after any error, the next question is still answered
        return _in_bytes("error", f"fails: {type(error).__name__}: {error}")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _last_in(pattern: str, text: str) -> str | None:
    """The last match of ``pattern`` in ``text``: its first group, if it has one."""
    last = deque(re.finditer(pattern, text), maxlen=1)
    found: list[str | None] = [match[1 if match.re.groups else 0] for match in last]
    return found[0] if found else None


def _in_bytes(kind: str, found: str | None) -> Answer:
    return Answer(marshal.dumps((kind, found)))
