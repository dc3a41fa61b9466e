"""Starts the engines' processes, each a fork of one that has imported the libraries.

Importing vLLM takes longer than loading a small model, and a search for a poison row restarts the
engine many times. So one process imports it, touches no GPU, and forks on request. A fork is like a
new process: it holds nothing of earlier engines.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from batchkit.errors import EngineError
from batchkit.storage.files import open_log

LOG = "engine.log"
SCRATCH = "BATCHKIT_SCRATCH"  # in a fork's environment: a folder that is deleted with it
KILL_S = 60.0
_MOST_SAID = 32
_COMMAND = [sys.executable, "-P", "-m", "batchkit.engines.process.child"]
_LAST_WORDS_S = 20.0  # a process with many libraries is slow to end


def log_of(log: Path, engine: str) -> Path:
    """The file that the engine of that name prints to, beside that of ``[engine]``, whose name is ""."""
    return log.with_name(f"{log.stem}.{engine}{log.suffix}") if engine else log


class LaunchError(Exception):
    """No process could be started; ``returncode`` is how the launcher ended, None if it did not."""

    def __init__(self, returncode: int | None) -> None:
        super().__init__(f"the launcher ended with {returncode}")
        self.returncode = returncode


class Launched:
    """An engine's process; ``returncode`` is as in ``subprocess.Popen``, None while it runs."""

    def __init__(self, pid: int, control: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._control = control

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code, or None if it still runs after ``timeout_s``."""
        if self.returncode is None:
            self._control.settimeout(timeout_s)
            try:
                self.returncode = _received_number(self._control)
            except (EOFError, ConnectionError):  # the launcher has ended, and its forks with it
                self.returncode = -signal.SIGKILL
            except TimeoutError:
                pass
        return self.returncode

    def kill(self) -> None:
        """Kill it; the launcher kills what it started. Returns when it has ended.

        Raises:
            EngineError: it can't be ended, for example because a driver hangs.
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
    """Launches one process at a time: it must have ended before the next launch.

    The launcher's own process starts with the first launch; what it and its forks print is appended
    to ``log``. ``environment``: its variables, besides those of this process. ``start`` is what starts it: tests fork it from a process that has imported vLLM.
    """

    start: ClassVar[type[subprocess.Popen[bytes]]] = subprocess.Popen

    def __init__(self, log: Path, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        self.log = log
        self._environment = environment
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
            return Launched(_received_number(self._control), self._control)
        except (OSError, EOFError):
            self._control.close()  # it closed its end, so it is exiting: wait for its exit code
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LAST_WORDS_S)
            ended = LaunchError(process.returncode)
            self.close()
            raise ended from None

    def close(self) -> None:
        """Kill the launcher's own process: it holds nothing that could be lost."""
        if self._process is not None:
            self._control.close()
            self._process.kill()
            self._process.wait()
            self._process = None

    def _begin(self, kind: str) -> subprocess.Popen[bytes]:
        self.close()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open_log(self.log) as log:
            self._process = self.start(
                [*_COMMAND, kind, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                env={
                    **os.environ,
                    **self._environment,
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                },
                process_group=0,  # Ctrl-C reaches only the run
            )
        return self._process


def _received_number(control: socket.socket) -> int:
    """A process id or an exit code."""
    if not (said := control.recv(_MOST_SAID)):
        raise EOFError
    return int(said)
