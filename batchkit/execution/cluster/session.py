"""Ray itself: joined or begun, and what a worker asks of it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from batchkit.config.tables import JobConfig
from batchkit.engines.registry import LIGHT
from batchkit.errors import EngineError, JobError
from batchkit.execution.cluster.local import begin, on_this_machine_alone, private_folder
from batchkit.execution.signals import Interrupted

CONNECT_S = 10.0
# RFC 9113, 3.4: what a client begins with, and the type of the frame that its server begins with.
_HTTP2_SETTINGS = b"\x04"
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + _HTTP2_SETTINGS + bytes(5)


@contextmanager
def session(job: JobConfig) -> Iterator[None]:
    """Ray, as long as this lasts: the one that the program has begun, a cluster's, or one of our own.

    Raises:
        JobError: not installed, no Ray at the address, or too small a machine.
        EngineError: no Ray could be started here.
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
    with ExitStack() as held:
        folder = None
        if not address:
            folder = held.enter_context(private_folder())
            held.enter_context(on_this_machine_alone())
        held.callback(ray.shutdown)
        _join(job, address, folder)
        # Ray tells of dead workers on stdout, which is for our results; we tell of them ourselves.
        ray._private.worker._worker_logs_enabled = False
        yield


def _join(job: JobConfig, address: str | None, folder: Path | None) -> None:
    """Join Ray at ``address``, or begin one whose files are in ``folder``."""
    import ray

    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        if folder is None:
            _knock(address or "")
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
        else:
            begin(job, folder)
    except SystemExit as error:  # what Ray's own handler of SIGTERM makes of one meanwhile
        raise Interrupted(signal.SIGTERM) from error
    except Exception as error:  # of no narrower type where Ray's processes are too slow to start
        if folder is None:
            raise JobError(
                f"run.workers: can't join Ray at {address} ({shortened(error)}); give the address that"
                " `ray start --head` printed, or none to begin Ray on this machine"
            ) from error
        raise EngineError(
            f"run.workers: Ray did not start on this machine ({shortened(error)}); if others keep it"
            " busy, run the same command again later"
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)
    if folder is not None:
        _check_gpus(job)


def _knock(address: str) -> None:
    """Raises OSError where no Ray is at ``host:port``: Ray itself would wait there for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdigit()):
        return
    with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S) as connection:
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
            return
        connection.sendall(_HTTP2_HELLO)
        with connection.makefile("rb") as answer:
            if answer.read(4)[3:] != _HTTP2_SETTINGS:
                raise ConnectionError("what listens there does not speak gRPC, so it is no Ray")


def _check_gpus(job: JobConfig) -> None:
    """Raises JobError where this machine has too few for all workers."""
    import ray

    workers = job.run.workers or 1
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
