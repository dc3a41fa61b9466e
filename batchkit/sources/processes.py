"""Processes of the run that answer questions, and are killed if they take too long.

Each thread has its own, started on first use: the kernel kills a process (``die_with_parent``) when
the thread that started it ends, so no other thread may depend on it. It gets one question at a time.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from batchkit.errors import EngineError

START_S = 120.0
STARTS = 3
_OF_THREAD = threading.local()


class Gone(Exception):
    """The process ended before it answered."""


class Started(NamedTuple):
    process: subprocess.Popen[bytes]
    connection: Connection


def start(module: str, *arguments: str, environ: Mapping[str, str] = os.environ) -> Started:
    """``python -m module FD arguments``, and the other end of the socket FD. It prints nothing.

    Raises:
        OSError: none can be started.
    """
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                process_group=0,  # Ctrl-C reaches only the run
            )
    except OSError:
        ours.close()
        raise
    return Started(process, Connection(ours.detach()))


def child_of_thread(module: str, task: str) -> Child:
    """This thread's process that runs ``module``. The kernel may kill it at any time, also during
    its start.

    Raises:
        EngineError: none can be started; ``task`` says what it was for.
    """
    children: dict[str, Child] = _OF_THREAD.__dict__
    child = children.get(module)
    if child is None or not child.is_alive:
        child = children[module] = _started(module, task)
    return child


def _started(module: str, task: str) -> Child:
    for _ in range(STARTS):
        with contextlib.suppress(Gone):
            return Child(module, task)
    raise EngineError(
        f"the process for {task} died {STARTS} times as it started: is memory or the number of"
        f" processes limited? `python -m {module} 0` shows its error"
    )


class Child:
    """The process that runs ``module``. It ends with its creator thread, or with this object."""

    def __init__(self, module: str, task: str) -> None:
        """Raises Gone if it dies during its start, and EngineError if it can't be started."""
        try:
            self._process, self._connection = start(module)
        except OSError as error:
            message = f"no process for {task} could be started: {error.strerror}"
            raise EngineError(message) from error
        self._end = weakref.finalize(self, _end, self._process, self._connection)
        try:
            self._await_answer(START_S)
        except TimeoutError:
            self._end()
            raise EngineError(
                f"the process for {task} did not start within {START_S:g} s: is the machine"
                " overloaded?"
            ) from None
        except BaseException:
            self._end()
            raise

    @property
    def is_alive(self) -> bool:
        return self._end.alive and self._process.poll() is None

    @property
    def returncode(self) -> int | None:
        """The exit status of an ended process."""
        return self._process.returncode

    def ask(self, question: bytes, timeout_s: float) -> bytes:
        """The process's answer. Raises TimeoutError or Gone; then the process was ended."""
        try:
            try:
                self._connection.send_bytes(question)
            except OSError as error:
                raise Gone from error
            return self._await_answer(timeout_s)
        except BaseException:  # a late answer would be taken for that of the next question
            self._end()
            raise

    def _await_answer(self, timeout_s: float) -> bytes:
        if not self._connection.poll(timeout_s):
            raise TimeoutError
        try:
            answer: bytes = self._connection.recv_bytes()
        except (EOFError, OSError) as error:  # OSError: in the middle of an answer
            raise Gone from error
        return answer


def _end(process: subprocess.Popen[bytes], connection: Any) -> None:
    connection.close()
    process.kill()
    process.wait()
