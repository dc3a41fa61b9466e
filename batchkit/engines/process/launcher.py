"""Starts the engines' processes, each a fork of one that has imported the libraries; and the log that they
print to.

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

from batchkit.config.regular_file import open_regular
from batchkit.errors import EngineError
from batchkit.storage.files import open_log

LOG = "engine.log"
SCRATCH = "BATCHKIT_SCRATCH"  # in a fork's environment: a folder that is deleted with it
KILL_S = 60.0
_MOST_SAID = 32
_COMMAND = [sys.executable, "-P", "-m", "batchkit.engines.process.child"]
MOST_BYTES = 32 * 2**20  # of a log
KEPT_BYTES = 4 * 2**20
_NOTICE = b"[batchkit: engine.log was cut here, to its last %d MiB]\n" % (KEPT_BYTES // 2**20)
_LAST_BYTES = 65536  # dumps of many threads must fit
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


class EngineLog:
    """The log of one engine: everything printed after this object was created belongs to it. Processes
    open it for appending, so it can be shortened while they print.

    One thread of one process cuts it; a line that is printed at that moment may be lost.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start = self.size()

    def size(self) -> int:
        """In bytes; 0 if the file does not exist."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def read(self, start: int) -> str:
        """Its content from ``start`` on; empty if the file was removed."""
        try:
            with open_regular(self.path) as file:
                file.seek(start)
                return file.readall().decode("utf-8", "replace")
        except OSError:
            return ""

    def printed(self) -> str:
        """The last part of what this engine printed."""
        return self.read(max(self._start, self.size() - _LAST_BYTES))

    def trim(self) -> None:
        """If it is larger than ``MOST_BYTES``, keep its last ``KEPT_BYTES``. Cheap otherwise."""
        size = self.size()
        if size <= MOST_BYTES:
            return
        with contextlib.suppress(OSError):  # removed, or the disk is full: then less is kept
            with open_regular(self.path) as file:
                file.seek(size - KEPT_BYTES)
                kept = file.read(KEPT_BYTES).partition(b"\n")[2]
            os.truncate(self.path, 0)
            cut = size - len(kept) - len(_NOTICE)  # everything moved by this much
            self._start = max(0, self._start - cut)
            with open_log(self.path) as file:
                file.write(_NOTICE + kept)


def _received_number(control: socket.socket) -> int:
    """A process id or an exit code."""
    if not (said := control.recv(_MOST_SAID)):
        raise EOFError
    return int(said)
