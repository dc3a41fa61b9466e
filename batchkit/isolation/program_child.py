"""The handler that becomes another program: the command that it is sent, in a process group of its own."""

from __future__ import annotations

import marshal
import os
import signal
import sys
from multiprocessing.connection import Connection

NOT_STARTED = 127  # as in a shell


def main(connection: Connection) -> None:
    command, environment = marshal.loads(connection.recv_bytes())
    os.setpgid(0, 0)
    # What Python and the fork server ignore, the program would, too.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)
    connection.close()
    try:
        os.execve(command[0], command, environment)
    except OSError as error:
        print(f"{command[0]}: can't be started: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(NOT_STARTED)
