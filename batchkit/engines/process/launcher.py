"""Starts the processes that engines live in, each a fork of one that has imported the libraries.

Importing vLLM takes longer than loading a small model, and a search for a poison row restarts the
engine again and again. So one process imports it, touches no GPU, and forks when asked. What it forks
is as good as new: it holds nothing of the engines before it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from batchkit.errors import EngineError
from batchkit.storage.files import open_log

LOG = "engine.log"
SCRATCH = "BATCHKIT_SCRATCH"  # in a fork's environment: a folder that goes with it
NUMBER_BYTES = 4
KILL_S = 60.0
_LAST_WORDS_S = 20.0  # a process with many libraries takes its time to end


class LaunchError(Exception):
    """No process could be started; ``returncode`` is how the launcher ended, None if it did not."""

    def __init__(self, returncode: int | None) -> None:
        super().__init__(f"the launcher ended with {returncode}")
        self.returncode = returncode


class Launched:
    """An engine's process; ``returncode`` is as ``subprocess.Popen`` has it, None while it lives."""

    def __init__(self, pid: int, control: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._control = control

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code, or None where it still lives after ``timeout_s``."""
        if self.returncode is None:
            self._control.settimeout(timeout_s)
            try:
                self.returncode = _receive_number(self._control)
            except EOFError:  # the launcher is gone, and what it forked went with it
                self.returncode = -signal.SIGKILL
            except TimeoutError:
                pass
        return self.returncode

    def kill(self) -> None:
        """End it; the launcher ends whatever it started. Returns when it is gone.

        Raises:
            EngineError: it can't be ended, as when a driver hangs.
        """
        if self.returncode is None:
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
            if self.wait(KILL_S) is None:
                raise EngineError(
                    f"the engine's process {self.pid}, or one that it started, can't be ended: it has"
                    f" not gone {KILL_S:.0f} s after SIGKILL, as when the GPU's driver hangs"
                )


class Launcher:
    """One at a time: what was launched must have ended before the next is asked for.

    Its own process starts with the first; what it and its forks print is appended to ``log``.
    """

    def __init__(self, log: Path) -> None:
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self, kind: str, connection: socket.socket) -> Launched:
        """A process that serves an engine of ``kind`` over ``connection``.

        Raises:
            LaunchError: the launcher's own process ended instead; ``log`` says why.
        """
        process = self._process
        if process is None or process.poll() is not None:
            process = self._begin(kind)
        try:
            socket.send_fds(self._control, [b"."], [connection.fileno()])
            self._control.settimeout(None)
            return Launched(_receive_number(self._control), self._control)
        except (OSError, EOFError):
            self._control.close()  # it has hung up, so it is ending: let it say how
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LAST_WORDS_S)
            ended = LaunchError(process.returncode)
            self.close()
            raise ended from None

    def close(self) -> None:
        """End the launcher's own process, whatever it is at: it holds nothing that could be lost."""
        if self._process is not None:
            self._control.close()
            self._process.kill()
            self._process.wait()
            self._process = None

    def _begin(self, kind: str) -> subprocess.Popen[bytes]:
        self.close()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._control, theirs = socket.socketpair()
        with theirs, open_log(self.log) as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "batchkit.engines.process.child",
                    kind,
                    str(theirs.fileno()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                process_group=0,  # Ctrl-C reaches the run alone
            )
        return self._process


def send_number(control: socket.socket, number: int) -> None:
    """A process id or an exit code."""
    control.sendall(number.to_bytes(NUMBER_BYTES, sys.byteorder, signed=True))


def _receive_number(control: socket.socket) -> int:
    read = control.recv(NUMBER_BYTES)  # sent in one piece, so never torn
    if not read:
        raise EOFError
    return int.from_bytes(read, sys.byteorder, signed=True)
