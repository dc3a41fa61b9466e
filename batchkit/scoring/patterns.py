"""Matches ``scoring.pattern`` as Python's ``re`` does, in a process that ends after its time."""

from __future__ import annotations

import marshal
import signal

from batchkit.isolation.client import Gone, ask
from batchkit.isolation.pattern_child import TIMEOUT_S
from batchkit.scoring.bounds import Unscorable

_HANDLER = "batchkit.isolation.pattern_child"
_WAIT_S = 120.0  # until a process that gets no CPU time is given up


def last_match(pattern: str, text: str) -> str | None:
    """The last match of ``pattern`` in ``text``: its first group, if it has one.

    Raises:
        Unscorable: it takes too much time or memory.
        EngineError: no process can be started.
    """
    try:
        answer = ask(_HANDLER, "scoring.pattern", marshal.dumps((pattern, text)), _WAIT_S)
    except TimeoutError:
        reason = f"did not finish within {_WAIT_S:g} s"
    except Gone as gone:
        reason = f"did not finish within {TIMEOUT_S:g} s of CPU time"
        if gone.returncode != -signal.SIGPROF:
            reason = "ended its process twice"
    else:
        kind, found = marshal.loads(answer)
        if kind == "value":
            match: str | None = found
            return match
        reason = found
    raise Unscorable(f"scoring.pattern {reason}: {pattern}")
