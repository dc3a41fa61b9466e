"""What a child process does: it answers questions within limits, and ends with its parent."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1


class Answer(NamedTuple):
    """``is_last``: the process ends after it, and the next one starts with little memory."""

    content: bytes
    is_last: bool = False


def answer_all(connection: Connection, answer: Callable[[bytes], Answer]) -> None:
    """Answer the questions that arrive over ``connection``, one at a time, until the caller ends."""
    with contextlib.suppress(EOFError, OSError):  # the caller has ended
        is_last = False
        while not is_last:
            content, is_last = answer(connection.recv_bytes())
            connection.send_bytes(content)


def limit_memory(n_bytes: int) -> int:
    """Limit this process's memory to ``n_bytes``, or to less if the run's own limit is lower."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = n_bytes if most == resource.RLIM_INFINITY else min(n_bytes, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    return limit


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends.

    Raises:
        OSError: the kernel refuses.
    """
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def prctl(option: int, *arguments: int | bytes) -> None:
    """Linux's call of that name (man 2 prctl); raises OSError."""
    typed = [ctypes.c_ulong(one) if isinstance(one, int) else one for one in arguments]
    zeros = [ctypes.c_ulong(0)] * (4 - len(typed))
    if ctypes.CDLL(None, use_errno=True).prctl(option, *typed, *zeros) < 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
