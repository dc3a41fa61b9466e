"""A stand-in for ``nvidia-cuda-mps-control``, which answers as NVIDIA's does and lets nothing compute.

``-d`` starts a process that waits; ``get_server_list`` fails without it; ``quit`` ends it.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

SCRIPT = """#!/bin/bash
pid="$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid"
if [ "$1" = -d ]; then
    [ -z "$CUDA_VISIBLE_DEVICES" ] || { echo "the engines' GPUs would be renumbered"; exit 1; }
    exec -a mps-stand-in setsid sleep 3600 > /dev/null 2>&1 < /dev/null &
    echo $! > "$pid"
    exit 0
fi
kill -0 "$(cat "$pid" 2> /dev/null)" 2> /dev/null || {
    echo "Cannot find MPS control daemon process"
    exit 1
}
[ "$(cat)" != quit ] || kill "$(cat "$pid")"
"""


def install(folder: Path, *, works: bool = True) -> dict[str, str]:
    """Return the variables of a process that finds the stand-in in ``folder``, and one GPU.

    ``works``: False installs a program that always fails, so engines take turns on their GPU.
    """
    program = folder / "nvidia-cuda-mps-control"
    program.write_text(SCRIPT if works else "#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    home = folder / "tmp"
    home.mkdir()
    return {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "TMPDIR": str(home),
        "CUDA_VISIBLE_DEVICES": "0",
    }


def daemons(variables: dict[str, str]) -> list[psutil.Process]:
    """The stand-ins that run, of a process with these variables."""
    files = Path(variables["TMPDIR"]).glob("batchkit-mps-*/pipe/*.pid")
    pids = [int(file.read_text()) for file in files]
    return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]


def has_ended(daemon: psutil.Process) -> bool:
    """Whether it runs no more; nobody may have waited for it."""
    return not daemon.is_running() or daemon.status() == psutil.STATUS_ZOMBIE
