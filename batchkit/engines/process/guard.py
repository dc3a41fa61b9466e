"""Beside a server that the run started, to end it with the run: ``python guard.py FD COMMAND…``.

The server's exit code goes over the socket FD. When that is hung up, by the run or because it is gone
however it went, the server is asked to end, and what is left of its process group a little later is
killed. Reads nothing of batchkit, so that it costs next to nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time

GRACE_S = 10.0
NOT_STARTED = 127  # as a shell has it
_PR_SET_PDEATHSIG = 1


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    try:
        server = subprocess.Popen(
            sys.argv[2:],
            stdin=subprocess.DEVNULL,
            process_group=0,  # what it starts can be ended with it
            preexec_fn=_die_with_guard,  # no threads here yet
        )
    except OSError as error:
        print(f"{sys.argv[2]}: can't be started: {error.strerror}", file=sys.stderr, flush=True)
        control.send(b"%d" % NOT_STARTED)
        return
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # the run decides when it is over
    threading.Thread(target=_end_with_run, args=(control, server.pid), daemon=True).start()
    if hasattr(os, "waitid"):  # macOS has it since Python 3.13
        os.waitid(
            os.P_PID, server.pid, os.WEXITED | os.WNOWAIT
        )  # not reaped: its number stays its own
    else:
        server.wait()
    _signal(server.pid, signal.SIGKILL)  # what it left behind
    with contextlib.suppress(OSError):
        control.send(b"%d" % server.wait())


def _end_with_run(control: socket.socket, group: int) -> None:
    """Beside the main thread, which waits for the server."""
    with contextlib.suppress(OSError):
        control.recv(1)
    _signal(group, signal.SIGTERM)
    time.sleep(GRACE_S)  # ends with the main thread, as soon as the server has
    _signal(group, signal.SIGKILL)


def _signal(group: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signum)


def _die_with_guard() -> None:
    """Linux only. Elsewhere the closed socket does it, a little later."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        return


if __name__ == "__main__":
    main()
