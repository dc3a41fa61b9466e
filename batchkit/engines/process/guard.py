"""Starts a server for the run and ends it with the run: ``python guard.py FD COMMAND…``.

The guard sends the server's exit code over the socket FD. When the run closes that socket, or ends
in any way, the guard asks the server to end, and kills what is left of its process group a little
later. It imports nothing of batchkit, to stay cheap.
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
from functools import partial

GRACE_S = 10.0
NOT_STARTED = 127  # as in a shell
_PR_SET_PDEATHSIG = 1


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    try:
        server = subprocess.Popen(
            sys.argv[2:],
            stdin=subprocess.DEVNULL,
            process_group=0,  # what it starts can be ended with it
            # No threads here yet.
            preexec_fn=partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.SIGKILL),
        )
    except OSError as error:
        print(f"{sys.argv[2]}: can't be started: {error.strerror}", file=sys.stderr, flush=True)
        control.send(b"%d" % NOT_STARTED)
        return
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # the run decides when to end
    threading.Thread(target=_end_with_run, args=(control, server.pid), daemon=True).start()
    # Not reaped: its process id is not reused.
    os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
    _signal(server.pid, signal.SIGKILL)  # what it left behind
    with contextlib.suppress(OSError):
        control.send(b"%d" % server.wait())


def _end_with_run(control: socket.socket, group: int) -> None:
    """Runs beside the main thread, which waits for the server."""
    with contextlib.suppress(OSError):
        control.recv(1)
    _signal(group, signal.SIGTERM)
    time.sleep(GRACE_S)  # the main thread ends this one as soon as the server has ended
    _signal(group, signal.SIGKILL)


def _signal(group: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signum)


if __name__ == "__main__":
    main()
