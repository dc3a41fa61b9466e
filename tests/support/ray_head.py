"""One Ray on this machine, which runs join by its address and their workers outlive."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from batchkit.engines.process.launcher import Launcher
from tests.support import forks
from tests.support.chat_server import ChatServer
from tests.support.paths import ROOT
from tests.support.waiting import until

_FORKS = "BATCHKIT_TEST_FORKS"
_MOST_BYTES = 2**17  # of a request for a fork
CPUS, GPUS = 8, 4  # Ray counts GPUs and does not look: nothing touches one


class RayHead:
    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self.address: str = cluster.address

    def workers(self) -> list[psutil.Process]:
        """The actors' processes, of whatever run."""
        return actors_below(psutil.Process())

    def worker_that_asks(self, server: ChatServer) -> psutil.Process:
        """The worker whose request this thread of ``server`` is answering."""
        for worker in self.workers():
            for connection in worker.net_connections("tcp"):
                if connection.laddr == server.here.client:
                    return worker
        raise AssertionError("no worker has this connection")

    @contextmanager
    def another_node(self, num_cpus: int) -> Iterator[psutil.Process]:
        """Its raylet, which starts its workers. Afterwards Ray knows that the node is gone: it would
        place the next run's workers there."""
        node = self._cluster.add_node(num_cpus=num_cpus)
        try:
            yield psutil.Process(node.all_processes["raylet"][0].process.pid)
        finally:
            self._cluster.remove_node(node, allow_graceful=False)
            until(lambda: self._n_alive() == 1)

    def _n_alive(self) -> int:
        return sum(node["Alive"] for node in self._cluster.global_state.node_table())


def actors_below(process: psutil.Process) -> list[psutil.Process]:
    family = process.children(recursive=True)
    return [one for one in family if one.is_running() and one.name().startswith("ray::Actor")]


@contextmanager
def start_head() -> Iterator[RayHead]:
    from ray.cluster_utils import Cluster

    with (
        tempfile.TemporaryDirectory(prefix="b", dir="/tmp", ignore_cleanup_errors=True) as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening,
        pytest.MonkeyPatch.context() as environment,
    ):
        listening.bind(path := str(Path(folder, "forks")))
        listening.listen()
        threading.Thread(target=_relay, args=(listening,), daemon=True).start()
        # Workers have the environment of their node.
        environment.setenv("PYTHONPATH", str(ROOT))
        environment.setenv("RAY_TMPDIR", folder)  # a short path: its sockets have long names
        environment.setenv(_FORKS, path)
        environment.setenv("__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR", f"{__name__}.fork_engines")
        environment.setenv("RAY_health_check_period_ms", "500")
        environment.setenv("RAY_prestart_worker_first_driver", "0")
        cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": CPUS,
                "num_gpus": GPUS,
                "include_dashboard": False,
                "include_log_monitor": False,
                "no_monitor": True,
            },
        )
        try:
            yield RayHead(cluster)
        finally:
            cluster.shutdown()


def fork_engines() -> None:
    """In a worker's process: its engines are forks of the test's fork server, too."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect(os.environ[_FORKS])
    forks._servers[True] = server
    Launcher.start = forks.Fork


def _relay(listening: socket.socket) -> None:
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:  # closed
            return
        threading.Thread(target=_relay_from, args=(connection,), daemon=True).start()


def _relay_from(connection: socket.socket) -> None:
    """Pass on to the fork server what a worker asks of it."""
    with connection:
        while True:
            data, fds, _, _ = socket.recv_fds(connection, _MOST_BYTES, 64)
            if not fds:
                return
            socket.send_fds(forks._connected(has_vllm=True), [data], fds)
            for fd in fds:
                os.close(fd)
