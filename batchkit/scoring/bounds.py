"""How much work an answer may cause. Each bound is far above what any real answer needs."""

from __future__ import annotations

import marshal
import signal

from batchkit.isolation.client import Gone, ask
from batchkit.isolation.pattern_child import MEMORY_BYTES, TIMEOUT_S

MOST_READ = 4_000_000  # characters of an answer that an extractor reads
MOST_COMPARED = 200_000  # characters of a prediction, and of a reference
MOST_MARKS = 1_000  # combining marks in a row: normalising them takes quadratic time
_HANDLER = "batchkit.isolation.pattern_child"
_WAIT_S = 120.0  # until a process that gets no CPU time is given up


class Unscorable(Exception):
    """Why an answer is not scored; the same words for all rows with the same cause."""


def check_length(what: str, text: str, most: int) -> None:
    """Raises Unscorable if ``text`` has more characters than ``most``."""
    if len(text) > most:
        raise Unscorable(f"the {what} has more than {most:,} characters")


def last_match(pattern: str, text: str) -> str | None:
    """The last match of ``pattern`` in ``text``: its first group, if it has one.

    Raises:
        Unscorable: it takes too much time or memory.
        EngineError: no process can be started.
    """
    try:
        kind, found = ask(_HANDLER, "scoring.pattern", marshal.dumps((pattern, text)), _WAIT_S)
    except TimeoutError:
        reason = f"did not finish within {_WAIT_S:g} s"
    except Gone as gone:
        reason = f"did not finish within {TIMEOUT_S:g} s of CPU time"
        if gone.returncode != -signal.SIGPROF:
            reason = "ended its process twice"
    else:
        if kind == "value":
            match: str | None = found
            return match
        too_much = f"needs more than {MEMORY_BYTES >> 30} GiB of memory"
        reason = too_much if kind == "memory" else f"fails: {found}"
    raise Unscorable(f"scoring.pattern {reason}: {pattern}")
