"""systemd, started in a container that shows this machine's files; what it writes to them is thrown away.

It needs Debian's package ``systemd-container``, and root. The container has the files of this machine as the lower layer of
an overlay, and its network, so that a server in it is reached at 127.0.0.1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from batchkit.isolation.child import die_with_parent
from tests.support.paths import ROOT
from tests.support.server_process import NotInstalledError
from tests.support.waiting import until


@contextmanager
def systemd_container() -> Iterator[Sequence[str]]:
    """Start a container and yield the words to put before a command, which then runs in it.

    Raises:
        NotInstalledError: systemd-nspawn is missing, or this process is not root's.
    """
    if shutil.which("systemd-nspawn") is None:
        raise NotInstalledError("systemd-nspawn is missing; apt-get install systemd-container")
    if os.geteuid() != 0:
        raise NotInstalledError("systemd-nspawn needs root")
    folder = Path(tempfile.mkdtemp(prefix="batchkit-systemd-", dir="/var/tmp"))
    layers = {name: folder / name for name in ("upper", "work", "root")}
    for layer in layers.values():
        layer.mkdir()
    options = f"lowerdir=/,upperdir={layers['upper']},workdir={layers['work']}"
    mount = ["mount", "-t", "overlay", "overlay", "-o", options, layers["root"]]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        shutil.rmtree(folder)
        raise NotInstalledError(f"no overlay can be mounted: {mounted.stderr.strip()}")
    command = [
        "systemd-nspawn",
        "--quiet",
        "--register=no",
        "--keep-unit",
        f"--machine=batchkit-{os.getpid()}",
    ]
    command += [
        f"--directory={layers['root']}",
        f"--bind-ro={ROOT}",
        "--boot",
        "systemd.unit=basic.target",
    ]
    log = folder / "boot.log"
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log.open("wb"), stderr=subprocess.STDOUT,
        preexec_fn=die_with_parent,
    )  # fmt: skip
    try:
        yield _entered(process, log)
    finally:
        process.terminate()
        process.wait()
        subprocess.run(["umount", layers["root"]], check=False)
        shutil.rmtree(folder)


def _entered(process: subprocess.Popen[bytes], log: Path) -> Sequence[str]:
    """Wait until systemd has started. Return the command that enters its container."""

    def leaders() -> list[int]:
        """The process in the container that is its number one."""
        assert process.poll() is None, log.read_text(errors="replace")[-2000:]
        children = psutil.Process(process.pid).children()
        return [child.pid for child in children if child.name() == "systemd"]

    until(leaders)
    enter = ["nsenter", "--target", str(leaders()[0]), "--mount", "--uts", "--ipc", "--pid", "--"]

    def is_up() -> bool:
        ready = [*enter, "systemctl", "is-active", "--quiet", "basic.target"]
        return subprocess.run(ready, capture_output=True, check=False).returncode == 0

    until(is_up)
    return enter
