"""Kill a run at many instants, start it again each time, and count what is on disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import orjson

from tests.support.forks import Fork
from tests.support.paths import ROOT


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
    start: Callable[[], subprocess.Popen[str]],
    log: Path,
    blows: Iterable[Blow],
    *,
    patience_s: float = 60.0,
) -> Storm:
    """Start, SIGKILL at the next of ``blows``, and again, until none is left.

    ``patience_s`` is how long a start may take to its first record. A run that ended before its kill
    ends the storm.
    """
    kills, lines = 0, list[int]()
    for blow in blows:
        size = _size(log)
        victim = start()
        deadline = time.monotonic() + patience_s
        while blow.awaits_record and _size(log) <= size and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(blow.delay_s)
        victim.kill()
        code = victim.wait()
        lines.append(log.read_bytes().count(b"\n") if log.exists() else 0)
        if code != -signal.SIGKILL:
            return Storm(kills, lines, code)
        kills += 1
    return Storm(kills, lines, None)


def kill_once(folder: Path, awaited: Path | None, delay_s: float) -> None:
    """Start ``job.toml`` in ``folder``, on real vLLM, and kill it with its engine: ``delay_s`` after its
    start, or after ``awaited`` was written to."""
    before = _state(awaited)
    process = Fork(
        [sys.executable, "-m", "batchkit", "run", "job.toml"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        deadline = time.monotonic() + 120
        while awaited is not None and _state(awaited) == before:
            assert process.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline, f"{awaited} is as before after two minutes"
            time.sleep(0.002)
        time.sleep(delay_s)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _state(path: Path | None) -> tuple[int, int]:
    if path is None or not path.exists():
        return 0, 0
    found = path.stat()
    return found.st_ino, found.st_size


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
