"""Matches ``scoring.pattern`` as Python's ``re`` does, within a time limit.

No thread can stop ``re`` (``(\\w+\\s?)+$`` needs only 40 characters to take hours), so a process
that can be killed runs it: ``matcher``. If a pattern can't take long on a text (``steps``), no
process is needed.
"""

from __future__ import annotations

import marshal
import signal

from batchkit.scoring.bounds import PATTERN_STEPS, PATTERN_TIMEOUT_S, PATTERN_WAIT_S, Unscorable
from batchkit.scoring.steps import last_in, most_steps
from batchkit.sources.processes import Gone, child_of_thread


def last_match(pattern: str, text: str) -> str | None:
    """The last match of ``pattern`` in ``text``: its first group, if it has one.

    Raises:
        Unscorable: it takes too much time or memory.
        EngineError: no process can be started.
    """
    if most_steps(pattern, text) <= PATTERN_STEPS:
        return last_in(pattern, text)
    question = marshal.dumps((pattern, text))
    for _ in range(2):  # the first one may have been killed from outside
        child = child_of_thread("batchkit.scoring.matcher", "scoring.pattern")
        try:
            kind, found = marshal.loads(child.ask(question, PATTERN_WAIT_S))
        except TimeoutError:
            raise Unscorable(
                f"scoring.pattern did not finish within {PATTERN_WAIT_S:g} s: {pattern}"
            ) from None
        except Gone:
            if child.returncode == -signal.SIGPROF:
                limit = f"{PATTERN_TIMEOUT_S:g} s of CPU time"
                raise Unscorable(
                    f"scoring.pattern did not finish within {limit}: {pattern}"
                ) from None
            continue
        if kind == "error":
            raise Unscorable(f"scoring.pattern {found}: {pattern}")
        match: str | None = found
        return match
    raise Unscorable(f"the process that matches scoring.pattern died twice over it: {pattern}")
