"""Kill a run at many instants, start it again each time, and count what is on disk.

``kill_often`` needs only a function that starts the run and a process that can be killed: a
``subprocess.Popen`` will do. Where a start costs too much, ``ForkServer`` imports batchkit once and
forks a child per start; each child is a process of its own and dies of a real SIGKILL.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Protocol

import orjson

from tests.support.paths import ROOT


class Victim(Protocol):
    """A started run; ``subprocess.Popen`` is one."""

    @property
    def pid(self) -> int: ...

    def wait(self) -> int:
        """Until it ended; the exit code, or minus the number of the signal that killed it."""


class Blow(NamedTuple):
    """When to kill: ``delay_s`` after the start, or after the first new record that follows it."""

    delay_s: float
    awaits_record: bool


class Storm(NamedTuple):
    """What the kills hit. ``lines`` are the whole lines of the log after each one."""

    kills: int
    lines: list[int]
    ended_by_itself: int | None

    @property
    def kills_after_progress(self) -> int:
        """Starts that added records before they were killed."""
        return sum(before < after for before, after in pairwise([0, *self.lines]))


def kill_often(
    start: Callable[[], Victim],
    log: Path,
    blows: Iterable[Blow],
    *,
    kill: Callable[[int, int], None] = os.kill,
    patience_s: float = 60.0,
) -> Storm:
    """Start, SIGKILL at the next of ``blows``, and again, until none is left.

    ``kill`` takes a pid and a signal; ``os.killpg`` takes the whole group of a process that leads
    one. ``patience_s`` is how long a start may take to its first record. A run that ended before
    its kill ends the storm.
    """
    kills, lines = 0, list[int]()
    for blow in blows:
        size = _size(log)
        victim = start()
        deadline = time.monotonic() + patience_s
        while blow.awaits_record and _size(log) <= size and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(blow.delay_s)
        with suppress(ProcessLookupError):  # it ended before
            kill(victim.pid, signal.SIGKILL)
        code = victim.wait()
        lines.append(log.read_bytes().count(b"\n") if log.exists() else 0)
        if code != -signal.SIGKILL:
            return Storm(kills, lines, code)
        kills += 1
    return Storm(kills, lines, None)


def _size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def answers_by_row(jsonl: Path) -> Counter[int]:
    """How many ok records a file of JSON lines holds for each row; every line must be whole."""
    found: Counter[int] = Counter()
    with jsonl.open("rb") as file:
        for line in file:
            record = orjson.loads(line)
            found[record["index"]] += record["status"] == "ok"
    return found


_SERVER = """
import os, sys
import batchkit.cli, batchkit.engines.dry_run, batchkit.commands.run, batchkit.sources.jsonl, numpy
for line in sys.stdin:
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        batchkit.cli.cli(line.rstrip("\\n").split("\\t"), prog_name="batchkit")
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class ForkServer:
    """Starts the command line in children of a process that has imported it; one at a time."""

    def __init__(self, folder: Path, stderr: Path) -> None:
        with stderr.open("w") as file:
            self._server = subprocess.Popen(
                [sys.executable, "-c", _SERVER],
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )

    def start(self, *args: str) -> Victim:
        """``batchkit args`` in a new child."""
        assert self._server.stdin is not None
        self._server.stdin.write("\t".join(args) + "\n")
        self._server.stdin.flush()
        return _Child(self, self._read())

    def close(self) -> None:
        """Let go of the server; it must have no child at work."""
        self._server.communicate()

    def _read(self) -> int:
        assert self._server.stdout is not None
        return int(self._server.stdout.readline())


class _Child:
    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server = server
        self.pid = pid

    def wait(self) -> int:
        return self._server._read()
