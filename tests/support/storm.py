"""Kill a run with its engine at some instant."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support.forks import Fork
from tests.support.paths import ROOT


def strike(
    folder: Path, awaited: Path | None, delay_s: float, *settings: str, start: type[Fork] = Fork
) -> None:
    """Start ``job.toml`` in ``folder`` and kill it: ``delay_s`` after its start, or after ``awaited`` was
    written to."""
    before = _state(awaited)
    process = start(
        [sys.executable, "-m", "batchkit", "run", "job.toml"]
        + [part for setting in settings for part in ("--set", setting)],
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
        assert process.poll() is None, "the run ended before it could be killed"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _state(path: Path | None) -> tuple[int, int]:
    if path is None or not path.exists():
        return 0, 0
    found = path.stat()
    return found.st_ino, found.st_size
