"""Ctrl-C at any instant of a command's first moments: one line, exit code 130, no traceback."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.slow
DOORS = {
    "module": [sys.executable, "-m", "batchkit"],
    # As pip writes it for the console script.
    "script": [sys.executable, "-c", "from batchkit.__main__ import main; main()"],
}


def write(folder: Path, rows: int) -> None:
    (folder / "in.jsonl").write_text('{"q": "a"}\n' * rows)
    (folder / "job.toml").write_text(
        'input.path = "in.jsonl"\nprompt.user = "{{ q }}"\nengine.kind = "dry-run"\n'
    )


def interrupted(command: list[str], cwd: Path, after_s: float) -> tuple[int, str]:
    process = subprocess.Popen(
        command,
        cwd=cwd,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        # A shell has what it runs in the background ignore SIGINT, and these tests with it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    try:
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, stderr


@pytest.mark.parametrize("door", DOORS)
def test_ctrl_c_during_the_first_imports_is_one_line(door: str, tmp_path: Path) -> None:
    write(tmp_path, rows=500_000)  # more than it gets to
    command, codes = [*DOORS[door], "validate", "job.toml"], []
    for step in itertools.count(1):
        if step > 13 and 130 in codes:  # a busy machine takes longer to come to our own code
            break
        code, stderr = interrupted(command, tmp_path, after_s=0.04 * step)
        if str(ROOT / "batchkit") not in stderr and "Traceback" in stderr:
            continue  # Python itself was still starting, and had not come to us
        codes.append(code)
        assert code in (130, -signal.SIGINT), stderr
        assert "Traceback" not in stderr
        assert len(stderr.splitlines()) <= 1, stderr


def test_limit_that_nobody_foresaw_is_one_line(tmp_path: Path) -> None:
    write(tmp_path, rows=1)
    code = "import sys; from batchkit.cli import cli; sys.setrecursionlimit(60); cli()"
    done = subprocess.run(
        [sys.executable, "-c", code, "validate", "job.toml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("batchkit: error: something in the job or its files is nested")
    assert done.stderr.count("\n") == 1
