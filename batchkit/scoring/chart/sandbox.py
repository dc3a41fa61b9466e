"""Runs one chart after another, each in its own confined process.

A sandbox is a process that has imported what charts need, and forks for each (``zygote``): 30 ms
per chart instead of two seconds. Its environment is emptied before it starts, so that neither it
nor its forks ever hold a secret.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from batchkit.config.installation import how_to_install
from batchkit.errors import JobError
from batchkit.scoring.chart.confine import what_is_missing
from batchkit.scoring.chart.messages import (
    CONFINED,
    MAX_RESULT_BYTES,
    MAX_Y_CHARS,
    Ended,
    Run,
    SandboxLimits,
    decode_ended,
    encode,
)
from batchkit.sources.processes import start

_LIBRARIES = ("pandas", "numpy", "matplotlib", "openpyxl")
_START_S = 120.0  # the first import after an installation compiles everything
_END_S = 5.0
_GRACE_S = 15.0  # on top of a chart's own time, for a busy machine
_PREFIX = "batchkit-chart-"
_MAX_PROBLEM_CHARS = 300
_MAX_ENDED_BYTES = 6 * MAX_RESULT_BYTES + 1000  # escaped again


class SandboxError(JobError):
    """Code that a model wrote can't be confined here, so it is not run."""


class Outcome(NamedTuple):
    """``problem``: why the code did not run to its end. ``y``: the values, in one or two forms."""

    y: list[str]
    problem: str | None


def check_sandbox() -> None:
    """Raises SandboxError if charts can't be run, before anything is started."""
    missing = what_is_missing()
    if missing is not None:
        raise _refusal(missing)
    absent = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    if absent:
        raise _refusal(f"{', '.join(absent)} is not installed ({how_to_install('charts')})")


class Sandbox:
    """Starts with the first run. One run at a time; ``close`` may be called by another thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._running = threading.Lock()  # held by the thread that runs a chart or closes it
        self._starting = threading.Lock()  # held while a process starts, and by ``close``

    def run(self, run: Run) -> Outcome:
        """The outcome of ``run``; a sandbox that died during it is started again, once.

        Raises:
            SandboxError: the sandbox can't be started, did not confine this run, or was closed.
        """
        with self._running:
            for _ in range(2):
                connection = self._started()
                try:
                    connection.send_bytes(encode(run))
                    if connection.poll(run.limits.timeout_s + _GRACE_S):
                        ended = decode_ended(connection.recv_bytes(_MAX_ENDED_BYTES))
                        return _outcome(ended, run.limits)
                except (OSError, EOFError):
                    pass
                self._end()
            return Outcome([], "the sandbox's own process died or hung under it, twice")

    def close(self) -> None:
        """End it and the chart that it runs. A ``run`` that waits in another thread ends, too."""
        with self._starting:
            self._closed = True
            process = self._process
        if process is not None:
            _terminate(process)
        with self._running:
            self._end()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _started(self) -> Connection:
        if self._process is not None and self._process.poll() is None:
            return self._connection
        self._end()
        with self._starting:
            if self._closed:
                raise SandboxError("the sandbox is closed")
            self._begin()
        try:
            if self._connection.poll(_START_S):
                refusal = self._connection.recv_bytes().decode()
            else:
                refusal = f"its process has not come up within {_START_S:.0f} s"
        except (OSError, EOFError):
            refusal = "its process ended while it started"
        if refusal:
            self._end()
            raise _refusal(refusal)
        return self._connection

    def _begin(self) -> None:
        self._folder = tempfile.mkdtemp(prefix=_PREFIX)
        self._process, self._connection = start(
            "batchkit.scoring.chart.zygote", self._folder, environ=_environment(self._folder)
        )

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _terminate(process)
            self._connection.close()
            shutil.rmtree(self._folder, ignore_errors=True)  # gone, unless it had to be killed


def _terminate(process: subprocess.Popen[bytes]) -> None:
    """May be called by two threads at once."""
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _refusal(reason: str) -> SandboxError:
    return SandboxError(
        f"charts can't be run: {reason}; code that a model wrote is never run unconfined,"
        " so chart rows stay unscored here"
    )


def _environment(folder: str) -> dict[str, str]:
    """The environment of a chart's process: no variable of this process's own but the paths of
    libraries."""
    libraries = os.environ.get("LD_LIBRARY_PATH")
    return {
        "HOME": folder,
        "TMPDIR": folder,
        "MPLCONFIGDIR": folder,
        "MPLBACKEND": "Agg",
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",  # the same chart gets the same score
        "PYTHONNOUSERSITE": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        **({} if libraries is None else {"LD_LIBRARY_PATH": libraries}),
    }


def _outcome(ended: Ended, limits: SandboxLimits) -> Outcome:
    if ended.written and not ended.written.startswith(CONFINED):
        raise _refusal(ended.written)  # sent before any code ran
    match ended.cause:
        case "time":
            return Outcome([], f"took longer than {limits.timeout_s:g} s")
        case "folder":
            return Outcome([], f"wrote more than {limits.folder_bytes} bytes of files")
        case "result":
            return Outcome([], f"wrote more than {MAX_RESULT_BYTES} bytes where its result belongs")
    if ended.returncode == -signal.SIGXCPU:
        return Outcome([], f"took longer than {limits.timeout_s:g} s of the processor's time")
    if ended.returncode == -signal.SIGKILL:
        return Outcome([], "killed: out of memory")  # by the kernel: we did not
    if ended.returncode < 0:
        return Outcome([], f"killed by {_name(-ended.returncode)}")
    return _reported(ended)


def _reported(ended: Ended) -> Outcome:
    """The outcome in what was sent, which the code may have written itself."""
    written = ended.written.removeprefix(CONFINED)
    if not written:
        return Outcome([], f"ended itself with exit code {ended.returncode}, without a result")
    try:
        result: Any = json.loads(written)
    except (ValueError, RecursionError):
        result = None
    match result:
        case {"problem": str(problem), **rest} if not rest:
            return Outcome([], _one_line(problem))
        case {"y": list(y), **rest} if not rest and all(map(_is_text, y)) and len(y) <= 2:
            return Outcome([text.encode(errors="replace").decode() for text in y], None)
    return Outcome([], "wrote something else where its result belongs")


def _name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:  # one of the real-time signals
        return f"signal {signum}"


def _one_line(text: str) -> str:
    """Without characters that would move a terminal's cursor, or can't be encoded."""
    line = " ".join(text.split())[:_MAX_PROBLEM_CHARS]
    return "".join(char if char.isprintable() else "?" for char in line)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MAX_Y_CHARS
