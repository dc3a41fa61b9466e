"""The client of fork servers: starts them, and kills their children if an answer takes too long."""

from __future__ import annotations

import contextlib
import marshal
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import IO, Any

from batchkit.errors import EngineError
from batchkit.isolation.server import FAILED, READY, START_S
from batchkit.storage.files import OwnFolder

_END_S = 5.0  # time for a process to end
_LAST_WORDS_S = 20.0  # a process with many libraries needs seconds to exit
_MOST_SAID = 2**13
_servers: weakref.WeakValueDictionary[str, Server] = weakref.WeakValueDictionary()
_starting = threading.Lock()  # held while a thread looks up or starts a server
_of_thread = threading.local()


class Gone(Exception):
    """An error for a process that ended before it answered. ``returncode``: None if it is unknown."""

    def __init__(self, returncode: int | None) -> None:
        super().__init__(f"exit code {returncode}")
        self.returncode = returncode


def ask(handler: str, task: str, question: bytes, timeout_s: float) -> tuple[str, Any]:
    """Send ``question`` to this thread's child for ``handler``, and return its reply (see ``child.answer_all``).

    If the child dies, a new child is asked once. A child that was killed because it exceeded its CPU time is not
    replaced.

    ``task``: the child's purpose in words, for messages.

    Raises:
        TimeoutError: No reply came in time; the child was killed.
        Gone: The child died before it replied.
        EngineError: No child could be started.
    """
    try:
        answer = _child_of_thread(handler, task).ask(question, timeout_s)
    except Gone as gone:
        if gone.returncode == -signal.SIGPROF:  # it ran out of CPU time and would do so again
            raise
        answer = _child_of_thread(handler, task).ask(question, timeout_s)
    kind, found = marshal.loads(answer)
    return kind, found


def server_of(handler: str, task: str) -> Server:
    """Return the fork server for ``handler``, which is started on first use and ends when its last reference is
    dropped.

    ``task``: the server's purpose in words, for messages.

    Raises:
        EngineError: The server could not be started.
    """
    with _starting:
        found = _servers.get(handler)
        if found is None or not found.is_alive:
            try:
                found = _servers[handler] = Server(handler, task)
            except Gone:
                raise EngineError(
                    f"the process for {task} died while starting; memory or the number of processes may be limited."
                    f" Run `python -c 'import {handler}'` to see the error"
                ) from None
        return found


def _bare(folder: str) -> dict[str, str]:
    """Return an environment with only library paths and the time zone of this process, because other variables may hold
    secrets."""
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "TZ") if name in os.environ}
    return {
        **kept,
        "HOME": folder,
        "TMPDIR": folder,
        "MPLCONFIGDIR": folder,
        "MPLBACKEND": "Agg",
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",  # the same code must give the same result each time
        "PYTHONNOUSERSITE": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


class Server:
    """A fork server, which imports a handler and forks children that run it. Any thread may use it. The server ends
    when this process ends or this object is deleted.

    - ``task``: the server's purpose in words, for messages.
    - ``arguments``: passed to the handler.
    - ``environment``: returns the server's variables, given its ``folder``, which is deleted when the server ends.
    - ``output``: where its printed output goes.
    - ``start``: starts the process.
    - ``waits``: if False, the constructor returns while the server still imports. The first ``fork`` then waits, and
      raises the errors of a failed start.
    """

    def __init__(
        self,
        handler: str,
        task: str,
        *arguments: str,
        environment: Callable[[str], Mapping[str, str]] = _bare,
        output: int | IO[bytes] = subprocess.DEVNULL,
        start: type[subprocess.Popen[bytes]] = subprocess.Popen,
        waits: bool = True,
    ) -> None:
        """Raise Gone if the server dies while starting, and EngineError if it cannot be started."""
        self._task = task
        try:
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                own = OwnFolder("isolation")
                self.folder = str(own.path)
                words = (str(theirs.fileno()), self.folder, handler, *arguments)
                self._process = start(
                    [sys.executable, "-P", "-m", "batchkit.isolation.server", *words],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[theirs.fileno()],
                    env={
                        **environment(self.folder),
                        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    },
                    process_group=0,  # Ctrl-C must reach only the run
                )
        except OSError as error:
            raise self._not_started(error.strerror) from error
        self._end = weakref.finalize(self, _end, self._process, self._control, own)
        self._is_started = False
        if waits:
            self._finish_start()

    def close(self) -> None:
        """End the server and its forks. May be called twice."""
        if not self._is_started:
            self._process.kill()  # it may be importing and would not react; it has no forks yet
        self._end()

    @property
    def is_alive(self) -> bool:
        return self._end.alive and self._process.poll() is None

    def fork(self) -> Child:
        """Start a child that runs the handler.

        Raises:
            Gone: The server has ended.
            EngineError: The system has too many open files or processes.
        """
        self._finish_start()
        try:
            ours, theirs = socket.socketpair()
            life, its_life = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise self._not_started(error.strerror) from error
        with theirs, its_life:
            try:
                fds = [its_life.fileno(), theirs.fileno()]
                socket.send_fds(self._control, [READY], fds)
            except OSError as error:
                raise self._gone() from error
        child = Child(self, Connection(ours.detach()), life)
        said = life.recv(_MOST_SAID)
        if said.startswith(FAILED):
            raise self._not_started(said.removeprefix(FAILED).decode())
        if not said.startswith(READY):
            raise Gone(int(said) if said else None)
        child.pid = int(said.removeprefix(READY))
        return child

    def _finish_start(self) -> None:
        if self._is_started:
            return
        try:
            self._await_start()
        except BaseException:
            self.close()
            raise
        self._is_started = True

    def _await_start(self) -> None:
        self._control.settimeout(START_S)
        try:
            said = self._control.recv(_MOST_SAID)
        except TimeoutError:
            raise EngineError(
                f"the process for {self._task} did not start within {START_S:g} s; the machine may be"
                " overloaded"
            ) from None
        except OSError:
            said = b""
        if not said:
            raise self._gone()
        if said != READY:
            raise self._not_started(said.removeprefix(FAILED).decode(errors="replace"))
        self._control.settimeout(None)

    def _gone(self) -> Gone:
        """Wait until the server has ended, and return a Gone with its exit code.

        Call it after the server has closed its end of the socket.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_WORDS_S)
        return Gone(self._process.returncode)

    def _not_started(self, reason: str | None) -> EngineError:
        return EngineError(f"could not start the process for {self._task}: {reason}")


class Child:
    """A fork of ``server``. It answers one question at a time, and ends when this object is deleted.

    ``returncode``: set when the process has ended. It stays None if the server ended at the same time.
    """

    def __init__(self, server: Server, connection: Connection, life: socket.socket) -> None:
        self.connection, self._life, self._server = connection, life, server
        self.pid = 0
        self.returncode: int | None = None
        self._has_ended = False
        self._close = weakref.finalize(self, _close, connection, life)

    def ask(self, question: bytes, timeout_s: float) -> bytes:
        """Return the reply to ``question``. Raises TimeoutError or Gone; in both cases the process has ended."""
        try:
            self.connection.send_bytes(question)
            if self.connection.poll(timeout_s):
                return self.connection.recv_bytes()
        except (EOFError, OSError) as error:  # OSError: the process died in the middle of a reply
            self.has_ended(_END_S)
            self.end()
            raise Gone(self.returncode) from error
        except BaseException:  # otherwise a late reply would be taken for the next question's
            self.end()
            raise
        self.end()
        raise TimeoutError

    def has_ended(self, timeout_s: float = 0) -> bool:
        """Wait up to ``timeout_s`` for the process to end; return whether it has ended."""
        if not self._has_ended:
            self._life.settimeout(timeout_s)
            try:
                code = self._life.recv(_MOST_SAID)
            except (TimeoutError, BlockingIOError):
                return False
            except OSError:
                code = b""
            self._has_ended = True
            self.returncode = int(code) if code else None
        return True

    def end(self, timeout_s: float = _END_S) -> bool:
        """Make the server kill the process. Return whether it ended within ``timeout_s``.

        If the process ends later, ``returncode`` stays None.
        """
        with contextlib.suppress(OSError):
            self._life.shutdown(socket.SHUT_WR)
        is_gone = self.has_ended(timeout_s)
        self._has_ended = True
        self._close()
        return is_gone


def _child_of_thread(handler: str, task: str) -> Child:
    children: dict[str, Child] = _of_thread.__dict__
    child = children.get(handler)
    if child is None or child.has_ended():
        child = children[handler] = server_of(handler, task).fork()
    return child


def _end(process: subprocess.Popen[bytes], control: socket.socket, own: OwnFolder) -> None:
    control.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    own.close()


def _close(connection: Connection, life: socket.socket) -> None:
    connection.close()
    life.close()
