"""Renders in a process of its own, which is ended where it takes too long.

Each thread has one, started when it is first needed: the kernel ends a process (see
``die_with_parent``) with the thread that started it, so no other thread may lean on it. It is asked one
thing at a time. Pickled values go to it, from the run; what comes back is ``marshal``'s plain values.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import socket
import subprocess
import sys
import threading
import weakref
from multiprocessing.connection import Connection
from typing import Any

from batchkit.errors import EngineError

START_S = 120.0
STARTS = 3
_OF_THREAD = threading.local()
_CORES = threading.BoundedSemaphore(len(os.sched_getaffinity(0)))  # more would only be slower


class Refused(Exception):
    """Why there is no text; with ``is_undefined``, for a name that is missing."""

    def __init__(self, message: str, *, is_undefined: bool = False) -> None:
        super().__init__(message)
        self.is_undefined = is_undefined


def rendered_apart(question: bytes, timeout_s: float) -> Any:
    """What the process answers to ``question``, a pickled (source, expression, names, leaves).

    Raises:
        Refused: the template fails, or takes too much memory.
        TimeoutError: it took longer than ``timeout_s``, and is ended.
        EngineError: no process can be started.
    """
    kind, value = _answer(question, timeout_s)
    if kind == "value":
        return value
    raise Refused(value, is_undefined=kind == "undefined")


def _answer(question: bytes, timeout_s: float) -> Any:
    for _ in range(2):  # somebody may have ended the first one, as the kernel for want of memory
        with _CORES:
            child: Child | None = getattr(_OF_THREAD, "child", None)
            if child is None or not child.is_alive:
                child = _OF_THREAD.child = started(
                    "batchkit.rendering.templates.child", "rendering templates"
                )
            with contextlib.suppress(Gone):
                return marshal.loads(child.ask(question, timeout_s))
    raise Refused(
        "the process that rendered its template died twice over it; it may need too much memory"
    )


def started(module: str, task: str) -> Child:
    """A process that runs ``module``, which the kernel may end at any time, also as it starts.

    Raises:
        EngineError: none can be started; ``task`` says what it was for.
    """
    for _ in range(STARTS):
        with contextlib.suppress(Gone):
            return Child(module, task)
    raise EngineError(
        f"the process for {task} died {STARTS} times as it started: is memory or the number of"
        f" processes limited? `python -m {module} 0` shows its error"
    )


class Gone(Exception):
    """The process has ended before it answered."""


class Child:
    """The process that runs ``module``. It ends with the thread that made it, and with this object."""

    def __init__(self, module: str, task: str) -> None:
        """Raises Gone if it dies as it starts, and EngineError if it can't be started."""
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise _no_process(task, error) from error
        try:
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", module, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    process_group=0,  # Ctrl-C reaches the run alone
                )
        except OSError as error:
            ours.close()
            raise _no_process(task, error) from error
        self._process = process
        self._connection: Any = Connection(ours.detach())
        self._end = weakref.finalize(self, _end, process, self._connection)
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
        """Of an ended process."""
        return self._process.returncode

    def ask(self, question: bytes, timeout_s: float) -> bytes:
        """Raises TimeoutError, or Gone; then it is ended."""
        try:
            try:
                self._connection.send_bytes(question)
            except OSError as error:
                raise Gone from error
            return self._await_answer(timeout_s)
        except BaseException:  # an answer that comes later would be taken for the next one's
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


def _no_process(task: str, error: OSError) -> EngineError:
    return EngineError(f"no process for {task} could be started: {error.strerror}")


def _end(process: subprocess.Popen[bytes], connection: Any) -> None:
    connection.close()
    process.kill()
    process.wait()
