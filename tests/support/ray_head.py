"""One Ray on this machine, which runs join by its address and their workers outlive."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from tests.support.chat_server import ChatServer
from tests.support.forks import fork_engines
from tests.support.paths import ROOT
from tests.support.waiting import until

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
            until(lambda: node.node_id not in self.nodes())

    def drain(self, raylet: psutil.Process) -> None:
        """Announce that the node will be lost in a minute, as ``ray start --block`` does after SIGTERM."""
        from ray._raylet import GcsClient
        from ray.core.generated.autoscaler_pb2 import DRAIN_NODE_REASON_PREEMPTION

        pids = {
            one.all_processes["raylet"][0].process.pid: one.node_id
            for one in self._cluster.worker_nodes
        }
        deadline_ms = int(1000 * (time.time() + 60))
        is_accepted, reason = GcsClient(address=self.address).drain_node(
            pids[raylet.pid], DRAIN_NODE_REASON_PREEMPTION, "a test", deadline_ms
        )
        assert is_accepted, reason

    def nodes(self) -> set[str]:
        """The ids of all nodes that Ray knows to be alive."""
        table = self._cluster.global_state.node_table()
        return {node["NodeID"] for node in table if node["Alive"]}


def actors_below(process: psutil.Process) -> list[psutil.Process]:
    family = process.children(recursive=True)
    return [one for one in family if one.is_running() and one.name().startswith("ray::Actor")]


@contextmanager
def start_head() -> Iterator[RayHead]:
    from ray.cluster_utils import Cluster

    with (
        tempfile.TemporaryDirectory(prefix="b", dir="/tmp", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as environment,
    ):
        # Workers have the environment of their node.
        environment.setenv("PYTHONPATH", str(ROOT))
        environment.setenv("RAY_TMPDIR", folder)  # a short path: its sockets have long names
        environment.setenv(
            "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR", f"{fork_engines.__module__}.fork_engines"
        )
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
