"""The handler that replaces itself by another program. It receives a command and runs it in a new process group."""

from __future__ import annotations

import marshal
import os
import signal
import sys
from multiprocessing.connection import Connection

NOT_STARTED = 127  # a shell's exit code for a program that can't be started


def main(connection: Connection) -> None:
    command, environment = marshal.loads(connection.recv_bytes())
    os.setpgid(0, 0)
    # A program inherits ignored signals, and Python and the fork server ignore these.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)
    connection.close()
    try:
        os.execve(command[0], command, environment)
    except OSError as error:
        print(f"{command[0]}: can't be started: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(NOT_STARTED)
