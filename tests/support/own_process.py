"""The command line in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT


def batchkit(
    *args: str | Path,
    cwd: Path,
    timeout_s: float = 240,
    start: type[subprocess.Popen[str]] = subprocess.Popen,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """One that loads vLLM is better a ``Fork``."""
    with start(
        [sys.executable, "-m", "batchkit", *map(str, args)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
