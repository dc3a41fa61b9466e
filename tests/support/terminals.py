"""Commands on a terminal of a given width."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

from tests.support.forks import LightFork
from tests.support.paths import ROOT


def on_a_terminal(
    *args: str | Path, columns: int = 100, stderr_only: bool = False, **environment: str
) -> str:
    """What ``batchkit`` writes to a terminal: each newline there is a carriage return too."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    known = {name: value for name, value in os.environ.items() if name != "TMUX"}
    process = LightFork(
        [sys.executable, "-m", "batchkit", *map(str, args)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if stderr_only else theirs,
        stderr=theirs,
        env={**known, "PYTHONPATH": str(ROOT), "TERM": "xterm", **environment},
    )
    os.close(theirs)
    written = b""
    try:
        while block := os.read(ours, 65536):
            written += block
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    process.wait(60)
    return written.decode()
