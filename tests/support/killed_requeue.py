"""``batchkit run job.toml --on-change requeue``, killed at an instant of its own.

The arguments: a function of ``os``, ``shutil`` or ``Path``, and a number: SIGKILL comes as that function is
called for the so-manieth time with a file that a requeue changes.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from batchkit.cli import cli

CHANGED = (".requeue", "results.jsonl", "steps.jsonl", "manifest")


def main() -> None:
    stop_at, number = sys.argv[1:]
    owner_name, _, name = stop_at.partition(".")
    owner: Any = {"os": os, "Path": Path, "shutil": shutil}[owner_name]
    real, left = getattr(owner, name), int(number)

    def killed(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        if any(part in str(arg) for arg in args for part in CHANGED):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(owner, name, killed)
    cli(["run", "job.toml", "--on-change", "requeue"], prog_name="batchkit")
