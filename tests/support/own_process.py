"""The command line in a process of its own."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE, CompletedProcess, Popen

import psutil

from tests.support.forks import LightFork
from tests.support.paths import ROOT


def batchkit(
    *args: str | Path,
    cwd: Path,
    timeout_s: float = 240,
    start: type[Popen[str]] = LightFork,
    **environment: str,
) -> CompletedProcess[str]:
    """One that loads a model is better a ``Fork``; one with another ``PYTHONPATH`` is a ``Popen``."""
    with begin(*args, cwd=cwd, start=start, **environment) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
    return CompletedProcess(process.args, process.returncode, stdout, stderr)


def begin(
    *args: str | Path, cwd: Path, start: type[Popen[str]] = LightFork, **environment: str
) -> Popen[str]:
    """The process in the background; what it prints is in pipes."""
    return start(
        [sys.executable, "-m", "batchkit", *map(str, args)],
        cwd=cwd,
        stdout=PIPE,
        stderr=PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )


def is_stopped_by(
    signum: signal.Signals, process: Popen[str], reached: Callable[[], object]
) -> None:
    """Sends the signal once ``reached()``; the run must end by it and say so."""
    while not reached():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signum)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signum, stderr
    assert f"stopped by {signum.name}" in stderr


def printing_to(*logs: Path) -> set[psutil.Process]:
    """The processes that have one of ``logs`` open."""
    paths, found = set(map(str, logs)), set[psutil.Process]()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if paths & {file.path for file in process.open_files()}:
                found.add(process)
    return found
