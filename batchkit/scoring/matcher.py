"""The process that matches ``scoring.pattern``: ``python -m batchkit.scoring.matcher FD``.

The kernel kills the process if a match takes
more than ``PATTERN_TIMEOUT_S`` of its CPU time: nothing else can stop ``re`` at any point.
"""

from __future__ import annotations

import marshal
import signal
import warnings

from batchkit.scoring.bounds import PATTERN_MEMORY, PATTERN_TIMEOUT_S
from batchkit.scoring.steps import last_in
from batchkit.sources.child_process import Answer, limit_memory, serve


def main() -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process
    limit_memory(PATTERN_MEMORY)
    warnings.simplefilter("ignore")  # else the first one is printed
    serve(_answer)


def _answer(question: bytes) -> Answer:
    """The ``marshal`` bytes of "value" and the last match, or of "error" and the reason."""
    signal.setitimer(signal.ITIMER_PROF, PATTERN_TIMEOUT_S)
    try:
        pattern, text = marshal.loads(question)
        return _in_bytes("value", last_in(pattern, text))
    except MemoryError:
        return _in_bytes("error", f"needs more than {PATTERN_MEMORY >> 30} GiB of memory")
    except Exception as error:  # after any error, the next question is still answered
        return _in_bytes("error", f"fails: {type(error).__name__}: {error}")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _in_bytes(kind: str, found: str | None) -> Answer:
    return Answer(marshal.dumps((kind, found)))


if __name__ == "__main__":
    main()
