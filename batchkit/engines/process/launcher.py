"""The launcher of engine processes, and the log that they print to.

Importing vLLM takes longer than loading a small model, and the search for a row that kills the engine restarts the
engine many times. So one process imports vLLM and forks on request. This process never uses a GPU. Each fork is like a
new process, because it has no state of earlier engines.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from batchkit.config.regular_file import open_regular
from batchkit.isolation.client import Child, Server
from batchkit.storage.files import open_log

LOG = "engine.log"
DOING = "batchkit: now "  # starts a log line that says what a loading engine is doing
SCRATCH = "BATCHKIT_SCRATCH"  # environment variable: a folder that is emptied when the process ends
MOST_BYTES = 32 * 2**20  # maximum size of a log
KEPT_BYTES = 4 * 2**20
_NOTICE = b"[batchkit: engine.log was cut here, to its last %d MiB]\n" % (KEPT_BYTES // 2**20)
_LAST_BYTES = 65536  # large enough for stack dumps of many threads


def log_of(log: Path, engine: str) -> Path:
    """Return the log file of the engine with this name: ``log`` for ``[engine]`` (name ""), a file beside it for
    ``[engines.NAME]``, and for each of several equal engines (name "#2")."""
    name = engine.replace("#", ".").lstrip(".")
    return log.with_name(f"{log.stem}.{name}{log.suffix}") if engine else log


class Launcher:
    """A starter of processes for one engine. The processes are forks of a process that has imported the engine's
    libraries. The first call of ``launch`` starts that process.

    - ``log``: file to which the processes' output is appended.
    - ``environment``: variables to add to this process's own.
    - ``start``: starts the process that forks; tests replace it to share a process that has imported vLLM.
    """

    start: ClassVar[type[subprocess.Popen[bytes]]] = subprocess.Popen

    def __init__(self, log: Path, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        self.log, self.environment = log, environment
        self._server: Server | None = None
        self._kind = ""

    def launch(self, kind: str) -> Child:
        """Start a process that serves an engine of ``kind`` over its connection. Raises EngineError or StoreError like
        ``isolation``'s ``Server``."""
        return self.prepare(kind).fork()

    def prepare(self, kind: str) -> Server:
        """Start the process that forks unless it runs. It imports the libraries of an engine of ``kind`` meanwhile."""
        if self._server is None or not self._server.is_alive or kind != self._kind:
            self.close()
            self._server, self._kind = self._begin(kind), kind
        return self._server

    def close(self) -> None:
        """End the process that forks, and its forks."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def _begin(self, kind: str) -> Server:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open_log(self.log) as log:
            return Server(
                "batchkit.engines.process.child",
                "the engine",
                kind,
                environment=lambda folder: {**os.environ, **self.environment, SCRATCH: folder},
                output=log,
                start=self.start,
                waits=False,
            )


class EngineLog:
    """The output of one engine: everything printed to its log after this object was created.

    Processes open the log for appending, so it can be shortened while they print; a line printed at that moment may be
    lost. Only one thread of one process may shorten it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start = self.size()

    def size(self) -> int:
        """Return the size in bytes, 0 if the file does not exist."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def read(self, start: int) -> str:
        """Return the log's content from byte ``start`` on; "" if the file was removed."""
        try:
            with open_regular(self.path) as file:
                file.seek(start)
                return file.readall().decode("utf-8", "replace")
        except OSError:
            return ""

    def printed(self) -> str:
        """Return the last part of this engine's output."""
        return self.read(max(self._start, self.size() - _LAST_BYTES))

    def trim(self) -> None:
        """If the log is larger than ``MOST_BYTES``, keep only its last ``KEPT_BYTES``. Cheap if it is smaller."""
        size = self.size()
        if size <= MOST_BYTES:
            return
        with contextlib.suppress(OSError):  # the file was removed or the disk is full: less is kept
            with open_regular(self.path) as file:
                file.seek(size - KEPT_BYTES)
                # Includes lines printed since size() was read.
                kept = file.readall().partition(b"\n")[2]
                size = file.tell()
            os.truncate(self.path, 0)
            cut = size - len(kept) - len(_NOTICE)  # all offsets move by this amount
            self._start = max(0, self._start - cut)
            with open_log(self.path) as file:
                file.write(_NOTICE + kept)
