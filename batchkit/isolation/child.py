"""Functions for child processes: answer questions, limit memory, and end with the parent process."""

from __future__ import annotations

import contextlib
import ctypes
import marshal
import resource
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_PR_SET_PDEATHSIG = 1


class ChildRefusal(Exception):
    """An error with which a handler refuses to answer a question. ``kind``: a word by which the client recognizes the
    reason."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def answer_all(connection: Connection, answer: Callable[[bytes], Any]) -> None:
    """Answer the questions that arrive over ``connection``, one at a time, until the client ends.

    Each reply is a pair, encoded by ``marshal``:

    - "value" and the result of ``answer``;
    - if ``answer`` raises an exception, its kind and its message. The kind is that of a ChildRefusal, "memory" for a
      MemoryError, otherwise "error".

    After "memory" this process ends, so that the next process starts with little memory in use.
    """
    with contextlib.suppress(EOFError, OSError):  # the caller has ended
        kind = ""
        while kind != "memory":
            question = connection.recv_bytes()
            try:
                kind = "value"
                content = marshal.dumps((kind, answer(question)))
            except ChildRefusal as refusal:
                kind, content = refusal.kind, marshal.dumps((refusal.kind, str(refusal)))
            except MemoryError as error:
                kind, content = "memory", marshal.dumps(("memory", str(error)))
            except Exception as error:  # templates and broken files may raise any exception
                kind = "error"
                content = marshal.dumps((kind, f"{type(error).__name__}: {error}"))
            connection.send_bytes(content)


def limit_memory(n_bytes: int) -> int:
    """Limit this process's memory to ``n_bytes``, or to its hard limit if that is lower. Return the limit."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = n_bytes if most == resource.RLIM_INFINITY else min(n_bytes, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    return limit


def die_with_parent(*, is_over: bool = False) -> None:
    """Make the kernel kill this process when the thread that started it ends. ``is_over``: True cancels this.

    Raises:
        OSError: The kernel refused.
    """
    prctl(_PR_SET_PDEATHSIG, 0 if is_over else signal.SIGKILL)


def prctl(option: int, *arguments: int | bytes) -> None:
    """Call Linux's prctl (man 2 prctl). Raises OSError if the call fails."""
    typed = [ctypes.c_ulong(one) if isinstance(one, int) else one for one in arguments]
    zeros = [ctypes.c_ulong(0)] * (4 - len(typed))
    if ctypes.CDLL(None, use_errno=True).prctl(option, *typed, *zeros) < 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
