"""Ray itself: joined or begun, and what a worker asks of it."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

from batchkit.config import JobConfig
from batchkit.engines import LIGHT
from batchkit.errors import JobError
from batchkit.stopping import Interrupted

CONNECT_S = 10.0
LONGEST_TMP = 16  # Ray's sockets have long names below it, and 107 bytes are all that they may have
_OBJECT_STORE_BYTES = 512 * 2**20


@contextmanager
def session(job: JobConfig) -> Iterator[None]:
    """Ray, as long as this lasts: the one that the program has begun, a cluster's, or one of our own.

    Raises:
        JobError: not installed, nobody at the address, or too small a machine.
    """
    try:
        import ray
    except ImportError:
        raise JobError(
            "run.workers: Ray is not installed; pip install 'batchkit[ray]', or leave workers out"
        ) from None
    if ray.is_initialized():
        yield
        return
    address = job.run.ray_address or os.environ.get("RAY_ADDRESS")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    home = tempfile.gettempdir()
    scratch_in = home if len(home) <= LONGEST_TMP else "/tmp"
    with tempfile.TemporaryDirectory(
        prefix="batchkit-ray-", dir=scratch_in, ignore_cleanup_errors=True
    ) as scratch:
        try:
            _join(job, address, scratch)
            # Ray tells of dead workers on stdout, which is for our results; we tell of them ourselves.
            ray._private.worker._worker_logs_enabled = False
            yield
        finally:
            ray.shutdown()


def _join(job: JobConfig, address: str | None, scratch: str) -> None:
    """Join Ray at ``address``, or begin one whose files are in ``scratch``."""
    import ray

    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        if address:
            _knock(address)
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
        else:
            _begin_local(job, scratch)
    except SystemExit as error:  # what Ray's own handler of SIGTERM makes of one meanwhile
        raise Interrupted(signal.SIGTERM) from error
    except (OSError, ValueError, RuntimeError) as error:
        raise JobError(
            f"run.workers: can't join Ray at {address} ({shortened(error)}); give the address that"
            " `ray start --head` printed, or none to begin Ray on this machine"
            if address
            else f"run.workers: Ray can't be started here: {shortened(error)}"
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)


def _knock(address: str) -> None:
    """Raises OSError where nobody is at ``host:port``: Ray itself would wait there for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()


def _begin_local(job: JobConfig, scratch: str) -> None:
    """Ray on this machine, for this run alone: heard on 127.0.0.1, gone with it."""
    import ray

    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # what makes it 127.0.0.1
    os.environ.setdefault("RAY_AUTH_TOKEN", uuid4().hex)  # else Ray leaves one in the home folder
    workers, run = job.run.workers or 1, job.run
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, math.ceil(workers * (run.worker_cpus or 1))),
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        logging_level=logging.ERROR,
        log_to_driver=False,
        _temp_dir=scratch,
    )
    gpus, here = needs(job)["num_gpus"], ray.cluster_resources().get("GPU", 0)
    if gpus * workers > here:
        raise JobError(
            f"run.workers = {workers} need {gpus * workers:g} GPUs, {gpus:g} each; this machine has"
            f" {here:g}. Ask for fewer, set run.worker_gpus, or join a cluster (run.ray_address)"
        )


def needs(job: JobConfig) -> dict[str, float]:
    """What a worker is to have for itself, as Ray names it.

    Left to us, GPUs are those that the engine asks for, where there are any at all; without one, the
    cores are shared out, and Ray gives each worker as many OpenMP threads.
    """
    import ray

    options, n_workers = job.engine.options, job.run.workers or 1
    gpus: float | None = job.run.worker_gpus
    if gpus is None:
        group = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
        has_model = job.engine.kind not in LIGHT
        gpus = group if has_model and ray.cluster_resources().get("GPU", 0) else 0
    cpus: float | None = job.run.worker_cpus
    if cpus is None:
        nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
        fair = range(sum(nodes) // n_workers if not gpus else 1, 1, -1)
        cpus = next((n for n in fair if sum(cpu // n for cpu in nodes) >= n_workers), 1)
    return {"num_cpus": cpus, "num_gpus": gpus}


def shortened(error: Exception) -> str:
    """Ray's messages are pages: the first of it."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]
