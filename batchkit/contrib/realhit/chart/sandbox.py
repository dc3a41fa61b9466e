"""A sandbox that runs one chart after another, each in its own confined process.

Each process is forked from a server process that has already imported the packages for charts, so a chart starts in 30
ms instead of two seconds. The server process starts with an empty environment, so that neither it nor its forks contain
a secret. Whether a chart has exceeded a limit is decided by the run's own process, because the chart's code can't
change that process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from batchkit.config.installation import how_to_install
from batchkit.contrib.realhit.chart.answer import TABLE_NAME, Mode
from batchkit.contrib.realhit.chart.confine import what_is_missing
from batchkit.errors import EngineError, JobError
from batchkit.isolation.client import Child, Gone, Server, server_of

CONFINED = "+"  # sent first by a confined process; other text is the reason why the process is not confined
SCRATCH = "scratch"
MAX_Y_CHARS = 2**16  # the longest reference of RealHiTBench has 2,236
MAX_RESULT_BYTES = 2**20  # enough for two texts of MAX_Y_CHARS, escaped as JSON, or an error
_HANDLER = "batchkit.contrib.realhit.chart.child"
_LIBRARIES = ("pandas", "numpy", "matplotlib", "openpyxl")
_TICK_S = 0.05
_MAX_FILES, _FOLDER_BYTES = 500, 2**26  # checked 20 times a second
_READ_BYTES = 2**16
_MAX_PROBLEM_CHARS = 300


class SandboxError(JobError):
    """An error for code that can't be confined on this machine and is therefore not run, or for a closed sandbox."""


class ProgramRun(NamedTuple):
    """Code to run in the sandbox. ``table``: the path of a file that is copied into the process's folder; None for no
    file. If ``code`` is None, the process only tries forbidden operations, such as opening a socket, to test that it is
    confined.
    """

    code: str | None = None
    chart_type: str = ""
    mode: Mode = "fixed"
    table: str | None = None


class ProgramOutcome(NamedTuple):
    """The result of a program. ``y``: the chart's values as text, in one or two versions (see ``fixed_readings``); []
    if the code failed. ``problem``: why the code failed; None if it ran to its end.
    """

    y: list[str]
    problem: str | None


class _Ended(NamedTuple):
    """The end of a chart's process.

    ``excess``: the limit that the process exceeded, so that it was killed; None if it ended by itself. ``returncode``:
    its exit status; negative if a signal ended it. ``written``: its output. Text after CONFINED may be anything,
    because the code may have written it.
    """

    excess: str | None
    returncode: int
    written: str


def check_sandbox() -> None:
    """Raise SandboxError if charts cannot be run on this machine. Starts no process."""
    missing = what_is_missing()
    if missing is not None:
        raise _refusal(missing)
    absent = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    if absent:
        raise _refusal(f"{', '.join(absent)} is not installed ({how_to_install('charts')})")


class Sandbox:
    """A sandbox for charts, started at the first ``run``. Any thread may call ``run`` and ``close``.

    A chart cannot start processes, and can start threads only within its memory limit.
    """

    def __init__(self, timeout_s: float = 20.0) -> None:
        self._timeout_s = timeout_s
        self._server: Server | None = None
        self._is_closed = False
        self._starting = threading.Lock()  # held by the thread that starts a server

    def run(self, run: ProgramRun) -> ProgramOutcome:
        """Run the code and return its outcome. If the server process dies meanwhile, it is started again and the code
        run again, once.

        Raises:
            SandboxError: the sandbox can't be started, can't confine the process for this run, or was closed.
        """
        for _ in range(2):
            with contextlib.suppress(Gone):
                return _outcome(self._run_in_fork(run, self._started()), self._timeout_s)
        return ProgramOutcome([], "the sandbox's server process died or hung twice while it ran")

    def close(self) -> None:
        """Close the sandbox. Each ``run`` in another thread ends its chart and soon raises SandboxError."""
        self._is_closed = True
        self._server = None

    def _started(self) -> Server:
        """Return the server process, and start one if there is none. A new one is returned only after a test fork has
        shown that its processes are confined."""
        with self._starting:
            if (server := self._server) is not None and server.is_alive:
                return server
            try:
                server = server_of(_HANDLER, "drawing charts")
            except EngineError as error:
                raise _refusal(str(error)) from error
            ended = self._run_in_fork(ProgramRun(), server)
            if ended.returncode != 0 or ended.written != CONFINED:
                reason = ended.written.removeprefix(CONFINED)
                raise _refusal(reason or f"confining a process ended in {ended}")
            self._server = server
            return server

    def _run_in_fork(self, run: ProgramRun, server: Server) -> _Ended:
        """Run one program in a new process forked from ``server``, in a temporary folder that is removed afterwards.

        Return how the process ended. Raises Gone if the server process dies.
        """
        home = Path(tempfile.mkdtemp(dir=server.folder))
        try:
            (home / SCRATCH).mkdir()
            if run.table is not None:
                with contextlib.suppress(OSError):  # the code will report that the file is missing
                    shutil.copyfile(run.table, home / TABLE_NAME)
            child = server.fork()
            try:
                child.connection.send_bytes(json.dumps([str(home), self._timeout_s, run]).encode())
                return self._watched(child, home / SCRATCH)
            except OSError as error:
                raise Gone(None) from error
            finally:
                child.end()
        finally:
            shutil.rmtree(home, ignore_errors=True)

    def _watched(self, child: Child, scratch: Path) -> _Ended:
        """Wait until the chart's process ends or exceeds a limit."""
        deadline = time.monotonic() + self._timeout_s
        written, is_open, excess = bytearray(), True, None
        while excess is None and (is_open or not child.has_ended(_TICK_S)):
            if self._is_closed:
                raise SandboxError("the sandbox is closed")
            if is_open and child.connection.poll(_TICK_S):
                read = b""
                with contextlib.suppress(ConnectionError):
                    read = os.read(child.connection.fileno(), _READ_BYTES)
                is_open = bool(read)
                written += read
            if time.monotonic() > deadline:
                excess = f"took longer than {self._timeout_s:g} s"
            else:
                excess = _excess(written, scratch)
        if excess is None and child.returncode is None:
            raise Gone(None)
        text = written[:MAX_RESULT_BYTES].decode(errors="replace")
        return _Ended(excess, child.returncode or 0, text)


def _excess(written: bytearray, scratch: Path) -> str | None:
    """Return a message about the limit that a chart has exceeded; None if it has exceeded none."""
    if len(written) > MAX_RESULT_BYTES:
        return f"wrote more than {MAX_RESULT_BYTES} bytes in place of its result"
    # The folder has no subfolders, because the code can't create any. No file is missed, because it can't remove files.
    with os.scandir(scratch) as entries:
        sizes = [entry.stat(follow_symlinks=False).st_blocks * 512 for entry in entries]
    if sum(sizes) > _FOLDER_BYTES or len(sizes) > _MAX_FILES:
        return f"wrote more than {_FOLDER_BYTES} bytes or {_MAX_FILES} files"
    return None


def _refusal(reason: str) -> SandboxError:
    return SandboxError(
        f"charts can't be run: {reason}; code that a model wrote is never run unconfined,"
        " so chart rows stay unscored here"
    )


def _outcome(ended: _Ended, timeout_s: float) -> ProgramOutcome:
    if ended.written and not ended.written.startswith(CONFINED):
        raise _refusal(ended.written)  # sent before any code ran
    if ended.excess is not None:
        return ProgramOutcome([], ended.excess)
    if ended.returncode == -signal.SIGXCPU:
        return ProgramOutcome([], f"took longer than {timeout_s:g} s of the processor's time")
    if ended.returncode == -signal.SIGKILL:
        # By the kernel, because batchkit has not killed it.
        return ProgramOutcome([], "killed: out of memory")
    if ended.returncode < 0:
        names = {signum.value: signum.name for signum in signal.Signals}
        number = -ended.returncode  # a real-time signal has no name
        return ProgramOutcome([], f"killed by {names.get(number, f'signal {number}')}")
    return _reported(ended)


def _reported(ended: _Ended) -> ProgramOutcome:
    """Return the outcome that the process reported. The code may have written the report itself, so it is checked."""
    written = ended.written.removeprefix(CONFINED)
    if not written:
        return ProgramOutcome(
            [], f"the code ended its process with exit code {ended.returncode}, without a result"
        )
    try:
        result: Any = json.loads(written)
    except (ValueError, RecursionError):
        result = None
    match result:
        case {"problem": str(problem), **rest} if not rest:
            # Without characters that would move a terminal's cursor, or can't be encoded.
            line = " ".join(problem.split())[:_MAX_PROBLEM_CHARS]
            return ProgramOutcome([], "".join(char if char.isprintable() else "?" for char in line))
        case {"y": [*y], **rest} if not rest and len(y) <= 2:
            if all(isinstance(text, str) and len(text) <= MAX_Y_CHARS for text in y):
                return ProgramOutcome([text.encode(errors="replace").decode() for text in y], None)
    return ProgramOutcome([], "wrote something else in place of its result")
