"""Joins or starts Ray, and computes what a worker needs of it."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from pathlib import Path

from batchkit.config.installation import how_to_install
from batchkit.config.tables import JobConfig
from batchkit.config.terminal import shortened
from batchkit.engines.registry import holds_model
from batchkit.errors import EngineError, Interrupted, JobError
from batchkit.execution.cluster.local import begin, on_this_machine_alone, private_folder

CONNECT_S = 10.0
# RFC 9113, 3.4: the client's preface, and the type of the first frame that a server sends.
_HTTP2_SETTINGS = b"\x04"
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + _HTTP2_SETTINGS + bytes(5)


@contextmanager
def session(job: JobConfig) -> Iterator[None]:
    """Ray inside this block: the one that the program has started, a cluster's, or our own.

    Raises:
        JobError: not installed, no Ray at the address, or this machine has too few GPUs.
        EngineError: no Ray could be started here.
    """
    if (imported := sys.modules.get("ray")) is not None and imported.is_initialized():
        yield
        return
    address = job.run.ray_address or os.environ.get("RAY_ADDRESS")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with ExitStack() as held:
        folder = None
        if not address:
            folder = held.enter_context(private_folder())
            held.enter_context(on_this_machine_alone())
        try:
            import ray
        except ImportError:
            raise JobError(
                f"run.workers: Ray is not installed; {how_to_install('ray')}, or leave workers out"
            ) from None
        held.callback(ray.shutdown)
        # Ray reports dead workers on stdout, which is for our results.
        held.enter_context(redirect_stdout(sys.stderr))
        _join(job, address, folder)
        yield


def _join(job: JobConfig, address: str | None, folder: Path | None) -> None:
    """Join Ray at ``address``, or start one whose files are in ``folder``."""
    import ray

    try:
        with _own_sigterm():
            if folder is None:
                _knock(address or "")
                ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
            else:
                begin(job, folder)
    except Exception as error:  # no narrower type if Ray's processes start too slowly
        if folder is None:
            raise JobError(
                f"run.workers: can't join Ray at {address} ({cause_of(error)}); give the address that"
                " `ray start --head` printed, or none to begin Ray on this machine"
            ) from error
        raise EngineError(
            f"run.workers: Ray did not start on this machine ({cause_of(error)}); if others keep it"
            " busy, run the same command again later"
        ) from error
    if folder is not None:
        _check_gpus(job)


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Inside, Ray sets a SIGTERM handler of its own, which raises SystemExit. Where Python ignores
    that, for example in a destructor, the signal would be lost, so it is also received by a socket.

    Raises:
        Interrupted: SIGTERM came.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # neither Ray nor this may set a handler
        return
    on_sigterm = signal.getsignal(signal.SIGTERM)
    inbox, outbox = socket.socketpair()
    with inbox, outbox:
        inbox.setblocking(False)
        outbox.setblocking(False)
        before = signal.set_wakeup_fd(outbox.fileno(), warn_on_full_buffer=False)
        try:
            yield
        except SystemExit as error:
            raise Interrupted(signal.SIGTERM) from error
        finally:
            signal.set_wakeup_fd(before)
            signal.signal(signal.SIGTERM, on_sigterm)
        with suppress(BlockingIOError):
            if signal.SIGTERM in inbox.recv(1024):
                raise Interrupted(signal.SIGTERM)


def _knock(address: str) -> None:
    """Raises OSError if no Ray is at ``host:port``: Ray itself would wait for minutes."""
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
    """Raises JobError if this machine has too few GPUs for all workers."""
    import ray

    workers = job.run.workers or 1
    gpus, here = needs(job)["num_gpus"], ray.cluster_resources().get("GPU", 0)
    if gpus * workers > here:
        raise JobError(
            f"run.workers = {workers} need {gpus * workers:g} GPUs, {gpus:g} each; this machine has"
            f" {here:g}. Ask for fewer, set run.worker_gpus, or join a cluster (run.ray_address)"
        )


def needs(job: JobConfig, engines: Sequence[str] = ("",)) -> dict[str, float]:
    """The resources of one worker that loads ``engines``, by Ray's names.

    If the job sets none, GPUs are those that one of them asks for, if there are any at all; without
    GPUs, the cores are shared out, and Ray gives each worker as many OpenMP threads.
    """
    import ray

    tables, n_workers = [job.with_engine(name).engine for name in engines], job.run.workers or 1
    gpus: float | None = job.run.worker_gpus
    if gpus is None:
        sizes = ("tensor_parallel_size", "pipeline_parallel_size")
        groups = [
            math.prod(engine.options.get(size, 1) for size in sizes)
            for engine in tables
            if holds_model(engine.kind)
        ]
        gpus = max(groups, default=0) if ray.cluster_resources().get("GPU", 0) else 0
    cpus: float | None = job.run.worker_cpus
    if cpus is None:
        nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
        fair = range(sum(nodes) // n_workers if not gpus else 1, 1, -1)
        cpus = next((n for n in fair if sum(cpu // n for cpu in nodes) >= n_workers), 1)
    return {"num_cpus": cpus, "num_gpus": gpus}


def cause_of(error: Exception) -> str:
    """Type and message in at most 300 characters: Ray's messages fill pages."""
    return shortened(f"{type(error).__name__}: {' '.join(str(error).split())}", 300)
