"""A private SLURM cluster (https://slurm.schedmd.com) on this machine: a controller, and nodes that can be lost.

It needs Debian's packages, and root: ``apt-get install --no-install-recommends slurm-wlm munge`` (22.05; the packages
start nothing where there is no systemd). All files are in a temporary folder, and all ports are at 127.0.0.1:

    munged --foreground --force --key-file=… --socket=…    # signs the messages of the others
    slurmctld -D -f slurm.conf                              # the controller
    slurmd -D -f slurm.conf -N node0                        # one for each node, with a port of its own

``slurm.conf`` says that all nodes are this host (``NodeHostname``). A node has one CPU, one GPU that does not exist, and a
disk: a folder that ``TMPDIR`` names in its jobs (``TaskProlog``). A job that is requeued waits for ``cred_expire`` and one
more second. The cluster is up a second after ``slurm_cluster``
began.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support.server_process import NotInstalledError, free_port, running
from tests.support.waiting import until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "sinfo")
# Processes are found by their parents, because a machine for tests may have no cgroups that can be written.
_CONF = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ReturnToService=2
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog={folder}/prolog
SchedulerParameters=sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
MailProg=/bin/true
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1 Gres=gpu:1\n"
_PROLOG = """\
#!/bin/sh
mkdir -p {folder}/disks/$SLURMD_NODENAME
echo export TMPDIR={folder}/disks/$SLURMD_NODENAME
"""
_FIELD = re.compile(r"(\S+?)=(\S*)")


@dataclass
class Cluster:
    """A running cluster, whose files are in ``folder``. ``nodes``: by name, what stops the node's slurmd."""

    folder: Path
    nodes: dict[str, ExitStack] = field(default_factory=dict)

    def run(self, *command: object, cwd: Path | None = None, **environment: str) -> str:
        """Run a command of SLURM. Return what it prints."""
        ended = subprocess.run(
            list(map(str, command)),
            cwd=cwd,
            env={**os.environ, **self._environment, **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert ended.returncode == 0, f"{command}: {ended.stderr}"
        return ended.stdout

    def tasks(self, job: str) -> dict[str, dict[str, str]]:
        """Return what ``scontrol`` says of the tasks of an array, by their numbers."""
        shown = self.run("scontrol", "show", "job", "--oneliner", job)
        found = [dict(_FIELD.findall(line)) for line in shown.splitlines()]
        return {task["ArrayTaskId"]: task for task in found}

    def start(self, name: str) -> None:
        """Switch a node on. Its disk is empty."""
        (self.folder / "spool" / name).mkdir(parents=True)
        self.nodes[name] = ExitStack()
        command = ["slurmd", "-D", "-f", self.folder / "slurm.conf", "-N", name]
        log = self.folder / f"{name}.log"
        self.nodes[name].enter_context(running(command, 0, log, **self._environment))

    def lose(self, name: str) -> None:
        """Kill everything that runs on a node, delete its disk, and tell the controller, which requeues its jobs."""
        self.switch_off(name)
        self.run("scontrol", "update", f"nodename={name}", "state=down", "reason=lost")

    def switch_off(self, name: str) -> None:
        """Kill everything that runs on a node, and delete its disk."""
        self.nodes.pop(name).close()
        until(lambda: not self._killed(name))
        for kind in ("spool", "disks"):
            shutil.rmtree(self.folder / kind / name, ignore_errors=True)

    def switch_all_off(self) -> None:
        for name in list(self.nodes):
            self.switch_off(name)

    @property
    def _environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def _killed(self, name: str) -> int:
        """Kill the jobs on a node. Return how many processes were there.

        A step's slurmstepd is the parent of its first process. It dies first, as it would report the death of its job.
        """
        wanted, found = {**self._environment, "SLURMD_NODENAME": name}.items(), 0
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if (
                    process.status() == psutil.STATUS_ZOMBIE
                    or not wanted <= process.environ().items()
                ):
                    continue
                found += 1
                parent = process.parent()
                if parent is not None and parent.name() == "slurmstepd":
                    parent.kill()
                process.kill()
        return found


@contextmanager
def slurm_cluster(n_nodes: int) -> Iterator[Cluster]:
    """Run a cluster with ``n_nodes`` nodes: node0, node1, …

    Raises:
        NotInstalledError: A program of SLURM is missing, or this process is not root's.
    """
    for program in PROGRAMS:
        if not shutil.which(program):
            raise NotInstalledError(f"{program} is missing; apt-get install slurm-wlm munge")
    if os.geteuid() != 0:
        raise NotInstalledError("SLURM's programs need root")
    # A folder with a short name: sockets are in it.
    with tempfile.TemporaryDirectory(prefix="slurm-") as name, ExitStack() as stack:
        cluster = Cluster(Path(name))
        stack.enter_context(_controller(cluster.folder, n_nodes))
        stack.callback(cluster.switch_all_off)
        for number in range(n_nodes):
            cluster.start(f"node{number}")
        until(lambda: cluster.run("sinfo", "-h", "-o", "%D%T") == f"{n_nodes}idle\n")
        yield cluster


@contextmanager
def _controller(folder: Path, n_nodes: int) -> Iterator[None]:
    host, port = socket.gethostname(), free_port()
    conf, prolog, key = (folder / name for name in ("slurm.conf", "prolog", "munge.key"))
    nodes = [
        _NODE.format(name=f"node{number}", host=host, port=free_port()) for number in range(n_nodes)
    ]
    conf.write_text(_CONF.format(folder=folder, host=host, port=port) + "".join(nodes))
    (folder / "gres.conf").write_text("Name=gpu File=/dev/zero\n")
    prolog.write_text(_PROLOG.format(folder=folder))
    prolog.chmod(0o700)
    key.touch(0o600)
    key.write_bytes(os.urandom(128))
    (folder / "state").mkdir()
    munge = {"key-file": key, "socket": folder / "munge.socket"}
    munge |= {f"{kind}-file": folder / f"munge.{kind}" for kind in ("log", "pid", "seed")}
    options = [f"--{name}={path}" for name, path in munge.items()]
    log = folder / "slurmctld.log"
    with running(["munged", "--foreground", "--force", *options], 0, folder / "munge.out"):
        until(munge["socket"].exists)
        with running(["slurmctld", "-D", "-f", conf], port, log):
            yield
