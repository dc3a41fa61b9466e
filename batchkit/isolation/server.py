"""The fork server: ``python -m batchkit.isolation.server FD FOLDER HANDLER [ARGUMENT…]``.

It imports HANDLER, starts no threads, and forks for each request that it receives over FD. The fork calls the handler's
``main``. The server ends with the process that started it; it then kills its forks with their process groups, and
deletes FOLDER.

A handler may also define ``prepare``, which is called once with the arguments, and ``tidy``, which the server calls
after each fork has ended.
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
import traceback
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from batchkit.isolation.child import die_with_parent

READY, FAILED = b"+", b"!"
START_S = 600  # the first import after an installation compiles all modules
_MOST_FDS = 64
_LOOK_S = 5.0  # between checks of the parent: another process may keep its end of the socket open
_MOST_BYTES = 2**17  # maximum size of a request
_MOST_SAID = 2000


class Fork(NamedTuple):
    """A request for a fork, as the fork receives it: a message and file descriptors.

    The fork sends its process id over ``life``. When the fork has ended, the server sends the fork's exit code over
    ``life``.
    """

    message: bytes
    life: socket.socket
    fds: list[int]

    def report(self) -> None:
        """Report that this process has started and can receive signals."""
        self.life.send(READY + str(os.getpid()).encode())
        self.life.close()


def main() -> None:
    control, folder, handler, *arguments = socket.socket(fileno=int(sys.argv[1])), *sys.argv[2:]
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # the parent decides when this process ends
    signal.alarm(START_S)  # ends this process if the import hangs
    try:
        die_with_parent()  # the thread that started this process lives until READY comes
        module = _prepared(handler, arguments)
        die_with_parent(is_over=True)
        control.send(READY)
    except Exception as error:  # a broken installation may raise any exception
        traceback.print_exc()
        with contextlib.suppress(OSError):
            control.send(FAILED + f"{type(error).__name__}: {error}".encode()[:_MOST_SAID])
        fork = None
    else:
        signal.alarm(0)
        fork = serve(control, tidy=getattr(module, "tidy", None))
    if fork is None:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)  # a normal exit is slow with many libraries loaded
    die_with_parent()
    fork.report()
    try:
        module.main(Connection(fork.fds[0]))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def serve(
    control: socket.socket, *, ends_with_caller: bool = True, tidy: Callable[[], None] | None = None
) -> Fork | None:
    """Fork for each request on ``control``, until its other end is closed or the parent has ended.

    Returns the request in a fork, and None in the server at its end. A request is a message with descriptors; the first
    one is the fork's ``life``.

    - ``ends_with_caller``: a fork is killed when the other end of its ``life`` is closed or the server ends. When the
      fork ends, the rest of its process group is killed.
    - ``tidy``: called after each fork has ended.
    """
    woken, waker = socket.socketpair()
    waker.setblocking(False)
    signal.set_wakeup_fd(waker.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler is needed to wake the select below
    parent, lives, killed = os.getppid(), dict[int, socket.socket](), set[int]()
    while True:
        callers = {
            pid: life for pid, life in lives.items() if ends_with_caller and pid not in killed
        }
        ready, _, _ = select.select([control, woken, *callers.values()], [], [], _LOOK_S)
        for pid, life in callers.items():
            if life in ready:
                _kill(pid)
                killed.add(pid)
        if woken in ready:
            woken.recv(_MOST_FDS)
        for pid in _ended(lives):
            if ends_with_caller:
                _kill(pid)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if tidy is not None:
                tidy()
            with lives.pop(pid) as life, contextlib.suppress(OSError):  # the caller may be gone
                life.send(str(code).encode())
            killed.discard(pid)
        request = _received(control) if control in ready else None
        if os.getppid() != parent or (control in ready and request is None):
            _end_all(lives if ends_with_caller else {})
            return None
        if request is not None and _forked(request, lives):
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for one in (control, woken, waker, *lives.values()):
                one.close()
            return request


def _prepared(handler: str, arguments: Sequence[str]) -> Any:
    warnings.simplefilter("ignore")
    gc.disable()  # imports leave little to collect, but collections take a fifth of vLLM's 15 s
    module = import_module(handler)
    if prepare := getattr(module, "prepare", None):
        prepare(*arguments)
    gc.enable()
    gc.freeze()  # a fork's garbage collector then skips the imported objects, so their memory is not copied
    return module


def _received(control: socket.socket) -> Fork | None:
    message, fds, _, _ = socket.recv_fds(control, _MOST_BYTES, _MOST_FDS)
    return Fork(message, socket.socket(fileno=fds[0]), fds[1:]) if fds else None


def _forked(request: Fork, lives: dict[int, socket.socket]) -> bool:
    """Fork for ``request``; return True in the fork, and False in the server."""
    try:
        pid = os.fork()
    except OSError as error:
        request.life.send(FAILED + str(error.strerror).encode())
    else:
        if pid == 0:
            return True
        lives[pid] = request.life
    for fd in request.fds:
        os.close(fd)
    return False


def _ended(lives: dict[int, socket.socket]) -> list[int]:
    """Return the forks that have ended. They are not reaped yet, so that their process ids are not reused."""
    look = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return [pid for pid in lives if os.waitid(os.P_PID, pid, look) is not None]


def _kill(pid: int) -> None:
    """Kill a fork that is not reaped yet. If the fork leads a process group, kill the group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)


def _end_all(lives: dict[int, socket.socket]) -> None:
    for pid in lives:
        _kill(pid)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
