"""A program that takes the place of NVIDIA's ``nvidia-cuda-mps-control`` for the commands of a benchmark."""

from __future__ import annotations

import os
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"


def environment(folder: Path, *, works: bool) -> dict[str, str]:
    """Write the program into ``folder``. Return the variables with which batchkit finds it first.

    ``works``: whether batchkit believes that MPS runs. Otherwise its engines take turns on their GPU.
    """
    program = folder / ("mps" if works else "no-mps") / CONTROL
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/sh\nexit {0 if works else 1}\n")
    program.chmod(0o755)
    return {"PATH": f"{program.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
