"""Renders in a separate process, which is killed if it takes too long.

Each thread has its own process, started on first use: the kernel kills a process (see
``die_with_parent``) when the thread that started it ends, so no other thread may depend on it. It
gets one question at a time. The run sends pickled values; the answers are plain values, written by
``marshal``.
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
    kind, value = _answer(question, timeout_s)
    if kind == "value":
        return value
    raise Refused(value, is_undefined=kind == "undefined")


def _answer(question: bytes, timeout_s: float) -> Any:
    for _ in range(2):  # the first may have been killed, for example by the kernel for its memory
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
    """A process that runs ``module``. The kernel may kill it at any time, also during its start.

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
    """The process ended before it answered."""


class Child:
    """The process that runs ``module``. It ends with its creator thread, or with this object."""

    def __init__(self, module: str, task: str) -> None:
        """Raises Gone if it dies during its start, and EngineError if it can't be started."""
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
                    process_group=0,  # Ctrl-C reaches only the run
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


def _no_process(task: str, error: OSError) -> EngineError:
    return EngineError(f"no process for {task} could be started: {error.strerror}")


def _end(process: subprocess.Popen[bytes], connection: Any) -> None:
    connection.close()
    process.kill()
    process.wait()
