"""Several workers, placed, pinned to their GPUs and restarted by Ray. Nothing else touches it.

The run hands out rows in leases and is the only one that writes (``batchkit.execution.cluster.leases`` says who gets how
many): ``pool``. In each process that Ray starts stands a Worker: ``actor``. ``session`` joins Ray or
begins it, and knows what a worker needs.
"""

from __future__ import annotations

from batchkit.execution.cluster.worker_pool import RayWorkerPool

__all__ = ["RayWorkerPool"]
