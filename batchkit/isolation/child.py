"""What a child process does: it answers questions within limits, and ends with its parent."""

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


class Refusal(Exception):
    """Why there is no answer: its ``kind``, and what to say."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def answer_all(connection: Connection, answer: Callable[[bytes], Any]) -> None:
    """Answer the questions that arrive over ``connection``, one at a time, until the caller ends.

    What is sent is ``marshal``'s bytes of "value" and what ``answer`` returns; or of the kind and the message of
    what it raises: a Refusal, "memory" after a MemoryError (then the process ends: the next one
    starts with little), or "error" after any other.
    """
    with contextlib.suppress(EOFError, OSError):  # the caller has ended
        kind = ""
        while kind != "memory":
            question = connection.recv_bytes()
            try:
                kind = "value"
                content = marshal.dumps((kind, answer(question)))
            except Refusal as refusal:
                kind, content = refusal.kind, marshal.dumps((refusal.kind, str(refusal)))
            except MemoryError as error:
                kind, content = "memory", marshal.dumps(("memory", str(error)))
            except Exception as error:  # a template or a broken file may raise anything
                kind = "error"
                content = marshal.dumps((kind, f"{type(error).__name__}: {error}"))
            connection.send_bytes(content)


def limit_memory(n_bytes: int) -> int:
    """Limit this process's memory to ``n_bytes``, or to less if the run's own limit is lower."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = n_bytes if most == resource.RLIM_INFINITY else min(n_bytes, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    return limit


def die_with_parent(*, is_over: bool = False) -> None:
    """Have the kernel kill this process when the thread that started it ends, until that ``is_over``.

    Raises:
        OSError: the kernel refuses.
    """
    prctl(_PR_SET_PDEATHSIG, 0 if is_over else signal.SIGKILL)


def prctl(option: int, *arguments: int | bytes) -> None:
    """Linux's call of that name (man 2 prctl); raises OSError."""
    typed = [ctypes.c_ulong(one) if isinstance(one, int) else one for one in arguments]
    zeros = [ctypes.c_ulong(0)] * (4 - len(typed))
    if ctypes.CDLL(None, use_errno=True).prctl(option, *typed, *zeros) < 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
