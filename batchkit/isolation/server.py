"""The fork server: ``python -m batchkit.isolation.server FD FOLDER HANDLER``.

It imports HANDLER, starts no thread, and forks for each request received over FD; the fork calls the
handler's ``main``. It ends with the process that started it, kills its forks, and deletes FOLDER.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import shutil
import signal
import socket
import sys
import warnings
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from batchkit.isolation.child import die_with_parent

READY, FAILED = b"+", b"!"
START_S = 120  # the first import after an installation compiles everything
_MOST_FDS = 64
_MOST_BYTES = 2**17  # of a request
_MOST_SAID = 2000


class Fork(NamedTuple):
    """What a fork has: the request's message and descriptors. The server reports over ``life``, to
    which the fork sends its process id, how it ends."""

    message: bytes
    life: socket.socket
    fds: list[int]

    def report(self) -> None:
        """The process is what was asked for: it can be sent signals from now on."""
        self.life.send(READY + str(os.getpid()).encode())
        self.life.close()


class _Life(NamedTuple):
    pid: int
    socket: socket.socket


def main() -> None:
    control, folder, handler = socket.socket(fileno=int(sys.argv[1])), *sys.argv[2:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
    signal.alarm(START_S)  # ends this process if the import never ends
    try:
        module = _prepared(handler)
        control.send(READY)
    except Exception as error:  # a broken installation may raise anything
        with contextlib.suppress(OSError):
            control.send(FAILED + f"{type(error).__name__}: {error}".encode()[:_MOST_SAID])
        fork = None
    else:
        signal.alarm(0)
        fork = serve(control)
    if fork is None:
        shutil.rmtree(folder, ignore_errors=True)
        return
    die_with_parent()
    fork.report()
    try:
        module.main(Connection(fork.fds[0]))
    finally:
        os._exit(0)


def serve(control: socket.socket, *, ends_with_caller: bool = True) -> Fork | None:
    """Fork for each request on ``control``; returns in the fork. Returns None here when the other
    end of ``control`` is closed, or the parent has ended.

    A request is a message and descriptors, of which the first is the fork's ``life``.
    ``ends_with_caller``: a fork is killed when the other end of its ``life`` is closed, and with the
    server.
    """
    parent, lives = os.pidfd_open(os.getppid()), dict[int, _Life]()
    while True:
        callers = [life.socket for life in lives.values()] if ends_with_caller else []
        watched: list[Any] = [control, parent, *lives, *callers]
        ready = set(select.select(watched, [], [])[0])
        for pidfd, life in [*lives.items()]:
            if life.socket in ready:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            if pidfd in ready:
                _report_end(pidfd, lives.pop(pidfd))
        if parent in ready or (control in ready and not (request := _received(control))):
            _end_all(lives if ends_with_caller else {})
            return None
        if control in ready and _forked(request, lives):
            for one in (control, *(life.socket for life in lives.values())):
                one.close()
            for fd in (parent, *lives):
                os.close(fd)
            return request


def _prepared(handler: str) -> Any:
    warnings.simplefilter("ignore")
    module = import_module(handler)
    if prepare := getattr(module, "prepare", None):
        prepare()
    gc.collect()
    gc.freeze()  # the forks' garbage collector skips, and so doesn't copy, what was imported
    return module


def _received(control: socket.socket) -> Fork | None:
    message, fds, _, _ = socket.recv_fds(control, _MOST_BYTES, _MOST_FDS)
    return Fork(message, socket.socket(fileno=fds[0]), fds[1:]) if fds else None


def _forked(request: Fork | None, lives: dict[int, _Life]) -> bool:
    """True in the fork."""
    assert request is not None
    try:
        pid = os.fork()
    except OSError as error:
        request.life.send(FAILED + str(error.strerror).encode())
    else:
        if pid == 0:
            return True
        lives[os.pidfd_open(pid)] = _Life(pid, request.life)
    for fd in request.fds:
        os.close(fd)
    return False


def _report_end(pidfd: int, life: _Life) -> None:
    os.close(pidfd)
    code = os.waitstatus_to_exitcode(os.waitpid(life.pid, 0)[1])
    with contextlib.suppress(OSError):  # nobody waits for it
        life.socket.send(str(code).encode())
    life.socket.close()


def _end_all(lives: dict[int, _Life]) -> None:
    for pidfd, life in lives.items():
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.waitpid(life.pid, 0)


if __name__ == "__main__":
    main()
