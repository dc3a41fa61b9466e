"""Ray's head node: whether it answers, and which nodes it removes from the cluster."""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress

from batchkit.errors import EngineError
from batchkit.execution.cluster.session import knock

KNOCK_S = 1.0
HEAD_GONE_S = 5.0  # Ray itself would end this process after a minute


class Head:
    """Ray's head node, watched by the run.

    - ``draining``: ids of nodes that have a notice: Ray will remove them. Empty unless ``is_auto``.
    - ``failure``: an error once the head has not accepted connections for ``HEAD_GONE_S``, otherwise None.
    """

    def __init__(self, *, is_auto: bool) -> None:
        self._is_auto = is_auto
        self.draining: Collection[str] = ()
        self.failure: EngineError | None = None
        self._next_knock = self._seen = time.monotonic()

    def watch(self) -> None:
        """Connect to the head node once a second, and ask it which nodes drain."""
        import ray

        now = time.monotonic()
        if now < self._next_knock:
            return
        self._next_knock = now + KNOCK_S
        address = ray.get_runtime_context().gcs_address
        try:
            knock(address)
            self._seen = now
            if self._is_auto:
                # Ray has no public function for it, and its own library Ray Train calls this one.
                self.draining = set(ray._private.state.state.get_draining_nodes())
        except OSError as error:
            if now - self._seen >= HEAD_GONE_S:
                self.failure = EngineError(
                    f"workers.count: Ray's head at {address} does not answer ({error}). Every finished row is on"
                    " disk: start Ray again, then run the same command again"
                )


def is_gone(node_id: str) -> bool:
    """Return whether a node has left the cluster, or its raylet or Ray's head accepts no connection."""
    import ray

    with suppress(OSError):
        knock(ray.get_runtime_context().gcs_address)
        for node in ray.nodes():
            if node["NodeID"] == node_id and node["Alive"]:
                knock(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}")
                return False
    return True
