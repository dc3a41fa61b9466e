"""The process that matches ``scoring.pattern``: ``python -m batchkit.scoring.matcher FD``.

Questions arrive over the socket FD, one at a time. The kernel kills the process if a match takes
more than ``PATTERN_TIMEOUT_S`` of its CPU time: nothing else can stop ``re`` at any point.
"""

from __future__ import annotations

import contextlib
import marshal
import resource
import signal
import sys
import warnings
from multiprocessing.connection import Connection
from typing import Any

from batchkit.rendering.child_process import die_with_parent
from batchkit.scoring.bounds import PATTERN_MEMORY, PATTERN_TIMEOUT_S
from batchkit.scoring.steps import last_in


def main() -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = PATTERN_MEMORY if most == resource.RLIM_INFINITY else min(PATTERN_MEMORY, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    warnings.simplefilter("ignore")  # else the first one is printed
    connection: Any = Connection(int(sys.argv[1]))
    connection.send_bytes(b"")  # it has started
    with contextlib.suppress(EOFError, OSError):  # the caller has ended
        while True:
            connection.send_bytes(_answer(connection.recv_bytes()))


def _answer(question: bytes) -> bytes:
    """The ``marshal`` bytes of "value" and the last match, or of "error" and the reason."""
    signal.setitimer(signal.ITIMER_PROF, PATTERN_TIMEOUT_S)
    try:
        pattern, text = marshal.loads(question)
        return marshal.dumps(("value", last_in(pattern, text)))
    except MemoryError:
        return marshal.dumps(("error", f"needs more than {PATTERN_MEMORY >> 30} GiB of memory"))
    except Exception as error:  # after any error, the next question is still answered
        return marshal.dumps(("error", f"fails: {type(error).__name__}: {error}"))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
