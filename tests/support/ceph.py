"""Ceph's RADOS gateway (https://docs.ceph.com) on the smallest cluster: a monitor, and an OSD with its objects in memory.

It needs Debian's packages: ``apt-get install --no-install-recommends radosgw ceph-mon ceph-osd``. The gateway answers
about ten seconds after ``ceph_gateway`` began. All files of the cluster are in one folder, and it listens only at
127.0.0.1.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from uuid import uuid4

from tests.support.server_process import NotInstalledError, free_port, running

PROGRAMS = (
    "ceph",
    "ceph-authtool",
    "ceph-mon",
    "ceph-osd",
    "monmaptool",
    "radosgw",
    "radosgw-admin",
)
# One copy of each object. No admin sockets: their paths would be too long.
_CONF = """\
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{port}]
public network = 127.0.0.1/32
keyring = {folder}/keyring
mon data = {folder}/mon
osd data = {folder}/osd
run dir = {folder}
log file = {folder}/$name.log
crash dir = {folder}
admin socket =
mon allow pool size one = true
osd objectstore = memstore
memstore device bytes = 4294967296
osd crush chooseleaf type = 0
osd pool default size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
"""


@contextmanager
def ceph_gateway(folder: Path, key: str, secret: str) -> Iterator[int]:
    """Run a cluster in ``folder``. Yield the port of its gateway, with one user, whose keys are given.

    Raises:
        NotInstalledError: A program of Ceph is missing.
    """
    for program in PROGRAMS:
        if not shutil.which(program):
            raise NotInstalledError(
                f"{program} is missing; apt-get install radosgw ceph-mon ceph-osd"
            )
    monitor_port, port, fsid, osd = free_port(), free_port(), uuid4(), uuid4()
    conf, log = folder / "ceph.conf", folder / "output.log"
    conf.write_text(_CONF.format(folder=folder, fsid=fsid, port=monitor_port))
    keyring, monitors = folder / "keyring", folder / "monitors"
    environment = {"CEPH_CONF": str(conf)}
    with ExitStack() as stack:

        def run(command: str) -> None:
            words, variables = shlex.split(command), {**os.environ, **environment}
            ended = subprocess.run(
                words, env=variables, capture_output=True, text=True, timeout=120
            )
            assert ended.returncode == 0, f"{command}: {ended.stderr[-2000:]}"

        def start(*command: str, port: int = 0) -> None:
            stack.enter_context(running([*command, "--foreground"], port, log, **environment))

        keyring.touch()
        for name in ("mon.", "osd.0", "client.admin"):
            caps = "--cap mon 'allow *' --cap osd 'allow *'"
            run(f"ceph-authtool {keyring} --gen-key --name {name} {caps}")
        address = f"[v2:127.0.0.1:{monitor_port}]"
        run(f"monmaptool --create --fsid {fsid} --addv a {address} {monitors}")
        run(f"ceph-mon --id a --mkfs --monmap {monitors} --keyring {keyring}")
        start("ceph-mon", "--id", "a", port=monitor_port)
        run(f"ceph osd new {osd}")  # the first one: its number is 0
        (folder / "osd").mkdir()
        run(f"ceph-osd --id 0 --mkfs --osd-uuid {osd}")
        start("ceph-osd", "--id", "0")
        gateway = ("radosgw", "--name", "client.admin", "--keyring", str(keyring))
        frontend = ("--rgw-frontends", f"beast endpoint=127.0.0.1:{port}")
        start(*gateway, "--rgw-data", str(folder), *frontend, port=port)
        keys = f"--access-key {key} --secret-key {secret}"
        run(f"radosgw-admin user create --uid tests --display-name tests {keys}")
        yield port
