"""Renders in a separate process (``child``), which is killed if it takes too long.

The run sends pickled values; the answers are plain values, written by ``marshal``.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import threading
from typing import Any

from batchkit.sources.processes import Gone, child_of_thread

_CORES = threading.BoundedSemaphore(len(os.sched_getaffinity(0)))  # more would only be slower


class Refused(Exception):
    """Why there is no text; ``is_undefined`` if a name is missing."""

    def __init__(self, message: str, *, is_undefined: bool = False) -> None:
        super().__init__(message)
        self.is_undefined = is_undefined


def rendered_apart(question: bytes, timeout_s: float) -> Any:
    """The process's answer to ``question``, a pickled (source, expression, names, leaves).

    Raises:
        Refused: the template fails, or uses too much memory.
        TimeoutError: it took longer than ``timeout_s``; the process was killed.
        EngineError: no process can be started.
    """
    for _ in range(2):  # the first may have been killed, for example by the kernel for its memory
        with _CORES, contextlib.suppress(Gone):
            child = child_of_thread("batchkit.rendering.templates.child", "rendering templates")
            kind, value = marshal.loads(child.ask(question, timeout_s))
            if kind == "value":
                return value
            raise Refused(value, is_undefined=kind == "undefined")
    raise Refused(
        "the process that rendered its template died twice over it; it may need too much memory"
    )
