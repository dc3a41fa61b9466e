"""Starts fork servers, and asks their forks, which are killed if they take too long."""

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

_END_S = 5.0
_LAST_WORDS_S = 20.0  # a process with many libraries is slow to end
_MOST_SAID = 2**13
_servers: weakref.WeakValueDictionary[str, Server] = weakref.WeakValueDictionary()
_starting = threading.Lock()  # held by the thread that starts a server
_of_thread = threading.local()


class Gone(Exception):
    """The process ended before it answered; ``returncode`` is None if nobody knows how."""

    def __init__(self, returncode: int | None) -> None:
        super().__init__(f"exit code {returncode}")
        self.returncode = returncode


def ask(handler: str, task: str, question: bytes, timeout_s: float) -> tuple[str, Any]:
    """What this thread's process that runs ``handler`` answers (``child.answer_all``). A process that was killed from
    outside is replaced once; the one that died over its own limit of CPU time is not.

    Raises:
        TimeoutError: there was no answer in time; the process was killed.
        Gone: it died before it answered.
        EngineError: none can be started; ``task`` says what it was for.
    """
    try:
        answer = _child_of_thread(handler, task).ask(question, timeout_s)
    except Gone as gone:
        if gone.returncode == -signal.SIGPROF:
            raise
        answer = _child_of_thread(handler, task).ask(question, timeout_s)
    kind, found = marshal.loads(answer)
    return kind, found


def server_of(handler: str, task: str) -> Server:
    """The fork server for ``handler``, started on first use. It ends when nobody holds it.

    Raises:
        EngineError: none can be started; ``task`` says what it was for.
    """
    with _starting:
        found = _servers.get(handler)
        if found is None or not found.is_alive:
            try:
                found = _servers[handler] = Server(handler, task)
            except Gone:
                raise EngineError(
                    f"the process for {task} died as it started: is memory or the number of processes"
                    f" limited? `python -c 'import {handler}'` shows its error"
                ) from None
        return found


def _bare(folder: str) -> dict[str, str]:
    """No variable of this process's own, which may hold a secret, but the paths of libraries and
    the time zone."""
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "TZ") if name in os.environ}
    return {
        **kept,
        "HOME": folder,
        "TMPDIR": folder,
        "MPLCONFIGDIR": folder,
        "MPLBACKEND": "Agg",
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",  # the same chart gets the same score
        "PYTHONNOUSERSITE": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


class Server:
    """A fork server. Any thread may use it. It ends with the process, or with this object.

    ``task``: what it is for, in words. ``arguments`` are for the handler. ``environment`` gives its variables;
    its argument is the server's ``folder``, which is deleted with it. What is printed goes to ``output``.
    ``start`` starts the process.
    """

    def __init__(
        self,
        handler: str,
        task: str,
        *arguments: str,
        environment: Callable[[str], Mapping[str, str]] = _bare,
        output: int | IO[bytes] = subprocess.DEVNULL,
        start: type[subprocess.Popen[bytes]] = subprocess.Popen,
    ) -> None:
        """Raises Gone if it dies during its start, and EngineError if it can't be started."""
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
                    process_group=0,  # Ctrl-C reaches only the run
                )
        except OSError as error:
            raise self._not_started(error.strerror) from error
        self._end = weakref.finalize(self, _end, self._process, self._control, own)
        try:
            self._await_start()
        except BaseException:
            self._process.kill()  # it may be in the middle of an import; there is no fork yet
            self.close()
            raise

    def close(self) -> None:
        """End it and its forks. May be called twice."""
        self._end()

    @property
    def is_alive(self) -> bool:
        return self._end.alive and self._process.poll() is None

    def fork(self) -> Child:
        """A new process that runs the handler.

        Raises:
            Gone: the server has ended.
            EngineError: there are too many files or processes.
        """
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

    def _await_start(self) -> None:
        self._control.settimeout(START_S)
        try:
            said = self._control.recv(_MOST_SAID)
        except TimeoutError:
            raise EngineError(
                f"the process for {self._task} did not start within {START_S:g} s: is the machine"
                " overloaded?"
            ) from None
        except OSError:
            said = b""
        if not said:
            raise self._gone()
        if said != READY:
            raise self._not_started(said.removeprefix(FAILED).decode(errors="replace"))
        self._control.settimeout(None)

    def _gone(self) -> Gone:
        """It closed its end, so it is ending."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_WORDS_S)
        return Gone(self._process.returncode)

    def _not_started(self, reason: str | None) -> EngineError:
        return EngineError(f"no process for {self._task} could be started: {reason}")


class Child:
    """A fork of ``server``. It gets one question at a time, and ends with this object.

    ``returncode`` is that of a process that has ended; None, too, if its server ended with it.
    """

    def __init__(self, server: Server, connection: Connection, life: socket.socket) -> None:
        self.connection, self._life, self._server = connection, life, server
        self.pid = 0
        self.returncode: int | None = None
        self._has_ended = False
        self._close = weakref.finalize(self, _close, connection, life)

    def ask(self, question: bytes, timeout_s: float) -> bytes:
        """The process's answer. Raises TimeoutError or Gone; then the process was ended."""
        try:
            self.connection.send_bytes(question)
            if self.connection.poll(timeout_s):
                return self.connection.recv_bytes()
        except (EOFError, OSError) as error:  # OSError: in the middle of an answer
            self.has_ended(_END_S)
            self.end()
            raise Gone(self.returncode) from error
        except BaseException:  # a late answer would be taken for that of the next question
            self.end()
            raise
        self.end()
        raise TimeoutError

    def has_ended(self, timeout_s: float = 0) -> bool:
        """Whether the process ends within ``timeout_s``."""
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
        """Its server kills it: nothing more comes over its life from here. Returns whether it has ended
        within ``timeout_s``."""
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
