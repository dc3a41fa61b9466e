"""The process of one chart: it confines itself, then runs the chart's code."""

from __future__ import annotations

import ast
import base64
import contextlib
import datetime
import io
import json
import os
import re
import resource
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from batchkit.contrib.realhit.chart.answer import TABLE_NAME, TABLE_PATH, fixed
from batchkit.contrib.realhit.chart.confine import confine
from batchkit.contrib.realhit.chart.readings import fixed_readings, official_reading
from batchkit.contrib.realhit.chart.sandbox import CONFINED, MAX_Y_CHARS, SCRATCH, ProgramRun

_PROBLEM_CHARS = 1000
_RESULT_FD = 3
_MEMORY_BYTES = 2**30  # address space, in addition to that of the interpreter and its libraries
_FILE_BYTES = 2**24


def prepare() -> None:
    """Import the packages that charts use, and draw charts of a small table, so that processes forked from this process
    start fast."""
    import_module("matplotlib").use("Agg")
    pandas, pyplot = import_module("pandas"), import_module("matplotlib.pyplot")
    with contextlib.suppress(KeyError, ValueError):  # this version has no such option
        # Store text in object columns, as did the pandas versions for which the reference code was written.
        pandas.set_option("future.infer_string", False)
    table = io.BytesIO()
    pandas.DataFrame({"k": ["a", "b"], "v": [1, 2]}).to_excel(table, index=False)
    frame = pandas.read_excel(table)
    frame.plot(kind="bar", x="k", y="v")
    frame.groupby("k")["v"].sum().plot(kind="pie")
    pyplot.scatter([1], [1])
    pyplot.tight_layout()
    pyplot.close("all")


def main(connection: Connection) -> None:
    """Confine this process, report this, run the chart's code, and send back the y values of the chart. Never returns.

    CONFINED is sent before the code starts, so the code can't falsify it.
    """
    home, timeout_s, fields = json.loads(connection.recv_bytes())
    run = ProgramRun(*fields)
    returncode = 1
    try:
        try:
            _leave_the_server(connection.fileno(), Path(home) / SCRATCH)
            _limit(int(timeout_s) + 2)
            confine(readable=Path(home), writable=Path(home) / SCRATCH)
        except BaseException as error:
            _send(f"{type(error).__name__}: {error}")
        else:
            _send(CONFINED)
            _send(_escapes() if run.code is None else _result(run, Path(home) / TABLE_NAME))
            returncode = 0
    finally:
        os._exit(returncode)  # threads of the code may still run


def _leave_the_server(result: int, scratch: Path) -> None:
    """Leave the session of the server process, and give up its signal handlers, terminal, open files, working folder
    and library paths."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    if result != _RESULT_FD:
        os.dup2(result, _RESULT_FD)
    os.closerange(_RESULT_FD + 1, os.sysconf("SC_OPEN_MAX"))
    os.chdir(scratch)
    for name in ("PYTHONPATH", "LD_LIBRARY_PATH"):
        os.environ.pop(name, None)
    os.environ["HOME"] = os.environ["TMPDIR"] = str(scratch)
    tempfile.tempdir = None  # Python then finds the folder again from TMPDIR


def _limit(cpu_s: int) -> None:
    # If the machine runs out of memory, the kernel then kills this process instead of the run.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    for kind, value in (
        (resource.RLIMIT_AS, pages * resource.getpagesize() + _MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, _FILE_BYTES),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    # The lower limit sends SIGXCPU, which shows the cause.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))


def _send(text: str) -> None:
    data = text.encode()
    while data:
        data = data[os.write(_RESULT_FD, data) :]


def _escapes() -> str:
    """Try operations that the sandbox must prevent. Return a message about the first one that is not prevented, or
    ""."""
    attempts: dict[str, Callable[[], object]] = {
        "read the root folder": lambda: list(Path("/").iterdir()),
        "read the code of batchkit": lambda: Path(__file__).read_bytes(),
        "write beside its table": lambda: Path("../x").write_text(""),
        "open a socket": lambda: socket.socket(socket.AF_UNIX).close(),
        "fork": lambda: os.fork() or os._exit(0),
        "signal its parent": lambda: os.kill(os.getppid(), 0),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
        except PermissionError:
            continue
        return f"the sandbox lets code {name}"
    return ""


def _result(run: ProgramRun, table: Path) -> str:
    try:
        y = _values(run, str(table))
    except BaseException as error:  # SystemExit too: the code did not run to its end
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
        problem = text.replace(str(table), TABLE_NAME)[:_PROBLEM_CHARS]
        return json.dumps({"problem": problem})
    return json.dumps({"y": [text[:MAX_Y_CHARS] for text in y]})


def _values(run: ProgramRun, table: str) -> list[str]:
    pyplot = import_module("matplotlib.pyplot")
    printed = _Printed()
    sys.stdout, sys.stderr = printed, _Printed()
    code = (run.code or "").replace(TABLE_PATH, table)
    names = _names(pyplot)
    if run.mode == "fixed":
        pyplot.close = lambda *_, **__: None  # type: ignore[attr-defined]
        exec(compile(fixed(code), "<chart>", "exec"), names)
        return fixed_readings(pyplot, run.chart_type)
    numpy = import_module("numpy")
    if int(numpy.__version__.split(".")[0]) >= 2:
        # Print [np.float64(1.0)] as [1.0], because otherwise no chart would pass in official mode under numpy 2.
        numpy.set_printoptions(legacy="1.25")
    # As in the official runner, the code is below an `if`, and its locals are separate from its globals.
    body = "".join(f"    {line}\n" for line in code.strip().split("\n"))
    exec(compile(f"if __name__ == '__main__':\n{body}", "<chart>", "exec"), names, {})
    y = official_reading(pyplot, run.chart_type)
    return [f"{printed.getvalue()}{y}".strip() if y else ""]


def _names(pyplot: Any) -> dict[str, Any]:
    """Return the global names that a chart's code may use without an import. They are the names in the official
    runner's module."""
    return {
        "__name__": "__main__",
        "__builtins__": __builtins__,
        "pd": import_module("pandas"),
        "np": import_module("numpy"),
        "plt": pyplot,
        **{module.__name__: module for module in (ast, base64, datetime, io, json, os, re, sys)},
        "time": time,
    }


class _Printed(io.StringIO):
    """A stream that keeps the beginning of its output, up to a limit."""

    def write(self, text: str, /) -> int:
        room = MAX_Y_CHARS - self.tell()
        if room > 0:
            super().write(text[:room])
        return len(text)
