"""A server process that the run starts. It ends with the run, even if the run is killed."""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import os
import random
import re
import shutil
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from batchkit.config.server_command import HOST, words_of
from batchkit.config.tables import JobConfig, ServerTable
from batchkit.engines.faults import (
    Fault,
    StartFailed,
    fault_of_exit,
    mentions_memory,
    points_elsewhere,
)
from batchkit.engines.memory import HostMemory, MemoryWatch
from batchkit.engines.process.launcher import LOG, EngineLog
from batchkit.errors import EngineError, JobError
from batchkit.isolation.client import Child, Gone, Server
from batchkit.storage.files import open_log

_PORTS = range(20_000, 32_768)  # below Linux's ephemeral ports
_LOOK_S = 0.1
_GRACE_S, _STOP_S = 10.0, 15.0  # time to end after SIGTERM, and after SIGKILL
_LAST_LINES = 12
_LONGEST_CAUSE = 300
_ACCESS = " HTTP/1."  # marks an access log line, such as … 500 Internal Server Error
_ERROR = re.compile(r"error|exception|assert|fatal|failed", re.IGNORECASE)


class OwnServer:
    """A server that ``start`` starts with ``command``, on its own port. A fork server (``isolation/``) ends the server
    with the run.

    - ``log``: file to which the server's output is appended (default ``engine.log``).
    - ``limits``: options that determine how much memory the server claims at start, for the error if it does not start.
    """

    def __init__(
        self, job: JobConfig, command: str, limits: Mapping[str, Any], *, log: Path | None = None
    ) -> None:
        self.command = command
        self._table, self._limits = job.engine.server or ServerTable(), limits
        self._log = EngineLog(log or job.folder / LOG)
        self._host_memory = HostMemory(job)
        self._port, self._claim = claimed_port()
        self._forks: Server | None = None
        self._process: Child | None = None
        self._memory = MemoryWatch()

    @property
    def base_url(self) -> str:
        return f"http://{HOST}:{self._port}/v1"

    @property
    def host_bytes(self) -> int:
        """The server's memory in bytes if ``run.max_host_gb`` limits it, otherwise 0."""
        return 0 if self._process is None else self._host_memory.bytes_of(self._process.pid)

    def start(self) -> None:
        """Start the server.

        Raises:
            JobError: The program does not exist.
            StoreError, EngineError: Its log can't be written, or the system can't start a process.
        """
        name, *arguments = words_of(self.command, port=self._port)
        program = _found(name)
        if program is None:
            raise JobError(
                f"engine.server.command: program {name!r} not found (searched PATH and the folder of"
                f" {sys.executable}); install it, or give its full path"
            )
        try:
            self._log.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EngineError(f"{self._log.path}: can't be written: {error.strerror}") from error
        try:
            with open_log(self._log.path) as log:
                self._forks = Server(
                    "batchkit.isolation.program_child",
                    "the server",
                    environment=lambda folder: os.environ,
                    output=log,
                )
            self._process = self._forks.fork()
            command = [program, *arguments], dict(os.environ)
            self._process.connection.send_bytes(marshal.dumps(command))
        except (Gone, OSError) as error:
            raise EngineError(
                f"engine.server.command: {program} can't be started: {error}"
            ) from error

    async def come_up(self, is_ready: Callable[[str], Awaitable[bool]]) -> None:
        """Wait until the server is ready. Raises StartFailed if the server ended, or was not ready in time.

        ``is_ready`` is called repeatedly with the path to check, until it returns True.
        """
        limit_s = self._table.start_timeout_s
        ended = asyncio.ensure_future(self.death())
        try:
            async with asyncio.timeout(limit_s):
                while not ended.done() and not await is_ready(self._table.health):
                    await asyncio.wait([ended], timeout=_LOOK_S)
        except TimeoutError:
            url = f"http://{HOST}:{self._port}{self._table.health}"
            how = (
                f"not ready at {url} after {limit_s:g} s (engine.server.start_timeout_s); check that the"
                " command passes this port to the server"
            )
            raise self._failed(how, Fault("engine_crash", "timeout", how)) from None
        finally:
            ended.cancel()  # no effect if the server has ended
        if ended.done() and not ended.cancelled():
            fault = ended.result()
            raise self._failed(f"it ended before it was ready ({fault.type})", fault)

    async def death(self) -> Fault:
        """Wait until the server ends, and return the cause."""
        assert self._process is not None, "it was started"
        while not self._process.has_ended():
            self._log.trim()
            await asyncio.sleep(_LOOK_S)
        last_words = _cause(self._log.printed())
        return fault_of_exit(self._process.returncode, last_words, self._memory.evidence())

    def stop(self) -> None:
        """End the server and wait until it has ended. Call it after the event loop has ended. May be called twice.
        Raises EngineError if the server can't be ended, for example because a driver hangs."""
        process, self._process = self._process, None
        if process is not None and not process.has_ended():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.has_ended(_GRACE_S)
        is_gone = process is None or process.end(_STOP_S)
        if self._forks is not None:
            self._forks.close()
        self._claim.close()
        if not is_gone:
            raise EngineError(
                f"the server can't be ended: it still runs {_STOP_S:.0f} s after SIGKILL; its command is {self.command}"
            )

    def _failed(self, how: str, fault: Fault) -> StartFailed:
        lines = self._log.printed().strip().splitlines()[-_LAST_LINES:]
        printed = "".join(f"\n  {line}" for line in lines) or " nothing"
        message = f"the server did not start: {how}\n  {self.command}\nThe end of {self._log.path}:"
        return StartFailed(f"{message}{printed}", fault, self._limits)


def _found(name: str) -> str | None:
    """Return the path of program ``name``; None if it is not found.

    Also looks into the Python environment that batchkit runs in, which may not be activated.
    """
    return shutil.which(name) or shutil.which(name, path=Path(sys.executable).parent)


class ClaimedPort(NamedTuple):
    """A reserved port ``number``. No other run on this machine uses the port until ``claim`` is closed."""

    number: int
    claim: socket.socket


def claimed_port(ports: Iterable[int] = ()) -> ClaimedPort:
    """Reserve a free port from ``ports``. By default, take any port below the ephemeral range, because the system
    itself picks no port there.

    Two runs must never get the same port: a server may load for minutes before it binds its port, and its run would
    meanwhile send rows to the other run's server. Therefore the port is reserved by a Linux abstract socket whose name
    contains the port. All users see the name, and the name disappears when this process ends.

    Raises:
        EngineError: No port is free.
    """
    for number in ports or random.sample(_PORTS, len(_PORTS)):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0batchkit-server-{number}")
            with socket.socket() as probe:
                probe.bind((HOST, number))
        except OSError:
            claim.close()
        else:
            return ClaimedPort(number, claim)
    raise EngineError(f"{HOST}: no free port for the server; end other servers on this machine")


def _cause(log: str) -> str:
    """Return the last line of ``log`` about memory or, if there is none, the last line about an error."""
    lines = [" ".join(line.split()) for line in reversed(log.splitlines())]
    errors = (
        line
        for line in lines
        if _ERROR.search(line) and _ACCESS not in line and not points_elsewhere(line)
    )
    return next(filter(mentions_memory, lines), next(errors, ""))[:_LONGEST_CAUSE]
