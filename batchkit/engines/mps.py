"""NVIDIA's Multi-Process Service (MPS), with which several processes compute on one GPU at the same time.

Without it, the GPU switches between processes, and engines that share it are slower than one engine. This process starts
one control daemon for all its engines, with its sockets and logs in a private folder. The daemon ends with the process.
If the process is killed, the next start of a run ends the daemon.

Source: NVIDIA's MPS documentation (nvidia-cuda-mps-control, CUDA_MPS_PIPE_DIRECTORY, CUDA_MPS_LOG_DIRECTORY).
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from batchkit.storage import files

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_WAIT_S = 20.0
_LOCK = threading.Lock()  # engines are restarted in threads


class _Daemon:
    """A control daemon of this process. ``environment``: the variables with which a process uses it."""

    def __init__(self) -> None:
        self._folder = files.OwnFolder("mps")
        self.environment = _environment(self._folder.path)
        for path in self.environment.values():
            Path(path).mkdir(mode=0o700)

    def start(self) -> str:
        """Start the daemon unless it runs. Return why it can't run; "" if it runs."""
        if not _ask(self.environment, "get_server_list"):
            return ""
        # The engines select their GPUs themselves. If the daemon saw only some GPUs, MPS would renumber them.
        others = {name: its for name, its in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        obstacle = _run([CONTROL, "-d"], {**others, **self.environment})
        return obstacle or _ask(self.environment, "get_server_list")

    def stop(self) -> None:
        _quit(self._folder.path)
        self._folder.close()


_daemons: list[_Daemon] = []  # at most one
_said: list[str] = []  # the reason why it can't run: it is not tried again


def environment(say: Callable[[str], None]) -> Mapping[str, str]:
    """Return the variables with which a process computes under MPS. Start the daemon if necessary.

    If MPS can't run, pass the reason to ``say`` once, and return nothing. If the user has a daemon
    (CUDA_MPS_PIPE_DIRECTORY is set), it is used.
    """
    with _LOCK:
        if PIPES in os.environ or _said:
            return {}
        obstacle = _obstacle()
        if not obstacle:
            return _daemons[0].environment
        _said.append(obstacle)
        say(f"engines take turns on their GPU, because MPS can't run: {obstacle}")
        return {}


def remove_orphans() -> None:
    """Remove the temporary folders of processes that were killed, and stop their daemons."""
    files.remove_orphans(before=_quit)


def stop() -> None:
    """Stop this process's daemon."""
    with _LOCK:
        if _daemons:
            _daemons.pop().stop()


def _obstacle() -> str:
    """Start this process's daemon unless it runs. Return why it can't run."""
    if shutil.which(CONTROL) is None:
        return f"{CONTROL} is not installed"
    if not _daemons:
        _daemons.append(_Daemon())
        atexit.register(stop)
    return _daemons[0].start()


def _environment(folder: Path) -> dict[str, str]:
    return {PIPES: str(folder / "pipe"), LOGS: str(folder / "log")}


def _quit(folder: Path) -> None:
    its = _environment(folder)
    if Path(its[PIPES]).exists():
        _ask(its, "quit")


def _ask(its: Mapping[str, str], command: str) -> str:
    """Send ``command`` to a daemon. Return what went wrong; "" if it answered."""
    return _run([CONTROL], {**os.environ, **its}, command)


def _run(command: list[str], variables: Mapping[str, str], question: str = "") -> str:
    """Run a command, and return the last line that it printed if it failed; "" if it succeeded."""
    with tempfile.TemporaryFile() as output:  # a daemon may keep its output open
        try:
            code = subprocess.run(
                command,
                input=question.encode(),
                env=variables,
                stdout=output,
                stderr=output,
                timeout=_WAIT_S,
            ).returncode
        except (OSError, subprocess.SubprocessError) as error:
            return str(error)
        output.seek(0)
        lines = output.read().decode(errors="replace").split("\n")
    said = [line.strip() for line in lines if line.strip()]
    return "" if code == 0 else next(reversed(said), f"exit code {code}")
