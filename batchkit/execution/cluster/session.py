"""The connection to Ray: joins a cluster or starts Ray for the run, and computes the resources of a worker."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, redirect_stdout
from functools import cache
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from batchkit.config.tables import JobConfig
from batchkit.config.terminal import shortened
from batchkit.engines.registry import holds_model, require
from batchkit.errors import EngineError, Interrupted, JobError
from batchkit.storage.files import OwnFolder

CONNECT_S = 10.0
LONGEST_TMP = 14  # a socket path has at most 107 bytes, and Ray adds long names to this folder
_OBJECT_STORE_BYTES = 512 * 2**20


@contextmanager
def session(job: JobConfig) -> Iterator[None]:
    """Connect to Ray inside the block: to the Ray that the caller has started, to a cluster, or to a Ray that is
    started for this run.

    Raises:
        JobError: Ray is not installed or not running at the address, or this machine has too few GPUs.
        EngineError: Ray could not be started here.
    """
    if (imported := sys.modules.get("ray")) is not None and imported.is_initialized():
        yield
        return
    require(["ray"], user="workers.count", extra="ray")
    address = job.workers.ray_address or os.environ.get("RAY_ADDRESS")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with ExitStack() as held:
        folder = ""
        if not address:
            folder = str(held.enter_context(closing(_private_folder())).path)
            held.enter_context(_on_this_machine_alone())
        import ray

        # Ray reports dead workers on stdout, even while it ends; our stdout is for results.
        held.enter_context(redirect_stdout(sys.stderr))
        held.callback(ray.shutdown)
        with _own_sigterm():
            if address:
                _join(address)
            else:
                _begin(job, folder)
        yield


def _join(address: str) -> None:
    import ray

    try:
        knock(address)
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except Exception as error:
        raise JobError(
            f"workers.count: can't join Ray at {address} ({cause_of(error)}); set workers.ray_address to the address"
            " that `ray start --head` printed, or unset it (and RAY_ADDRESS) to start Ray on this machine"
        ) from error


def knock(address: str) -> None:
    """Raise OSError if nothing listens at ``host:port``. Without this check, Ray would wait for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()


def _private_folder() -> OwnFolder:
    """Create a private folder around Ray's own folder, because Ray makes its folder readable and writable for all
    users."""
    home = tempfile.gettempdir()
    return OwnFolder("ray", home if len(home) <= LONGEST_TMP else "/tmp")


def _begin(job: JobConfig, folder: str) -> None:
    """Start Ray for this run only."""
    import ray

    workers, cpus = job.workers.least, job.workers.cpus or 1
    try:
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, math.ceil(workers * cpus)),
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            logging_level=logging.ERROR,
            log_to_driver=False,
            _temp_dir=f"{folder}/ray",
        )
    except Exception as error:  # no narrower type if Ray's processes start too slowly
        raise EngineError(
            f"workers.count: Ray did not start on this machine ({cause_of(error)}); if other programs keep"
            " the machine busy, run the same command again later"
        ) from error
    _check_gpus(job)


@contextmanager
def _on_this_machine_alone() -> Iterator[None]:
    """Make Ray listen on 127.0.0.1 only and require a token for every call, if it is started inside the block.

    Ray has no argument for the address: it reads an environment variable when it is imported. If the program has
    imported Ray before, the variable comes too late; then Ray's private constant is changed instead.
    """
    # Ray sets RAY_AUTH_MODE and leaves it set: child processes then could not join a Ray without tokens.
    names = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_AUTH_TOKEN", "RAY_AUTH_MODE")
    before = {name: os.environ[name] for name in names if name in os.environ}
    constants: Any = sys.modules.get("ray._private.ray_constants", SimpleNamespace())
    reachable = getattr(constants, "ENABLE_RAY_CLUSTER", False)
    constants.ENABLE_RAY_CLUSTER = False
    os.environ[names[0]] = "0"
    os.environ.setdefault(names[1], _token())  # otherwise Ray writes one to the home folder
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = reachable
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)


@cache
def _token() -> str:
    """Return Ray's access token: one for the whole process, because Ray's library reads it only once."""
    return uuid4().hex


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Restore batchkit's SIGTERM handler after the block. In the block, Ray installs a handler that raises SystemExit.

    Raises:
        Interrupted: SIGTERM arrived.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python allows signal handlers only in the main thread
        return
    ours = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as error:
        raise Interrupted(signal.SIGTERM) from error
    finally:
        signal.signal(signal.SIGTERM, ours)


def _check_gpus(job: JobConfig) -> None:
    """Raise JobError if this machine has too few GPUs for all workers."""
    import ray

    workers = job.workers.least
    gpus, here = needs(job)["num_gpus"], ray.cluster_resources().get("GPU", 0)
    if gpus * workers > here:
        raise JobError(
            f"workers.count = {workers} need {gpus * workers:g} GPUs, {gpus:g} each; this machine has"
            f" {here:g}. Lower workers.count or workers.gpus, or join a cluster (workers.ray_address)"
        )


def needs(job: JobConfig, engines: Sequence[str] = ("",)) -> dict[str, float]:
    """Return the resources that one worker requests from Ray, by Ray's names.

    By default, ``num_gpus`` is the largest number of GPUs that one engine of the worker needs, if the cluster has GPUs.
    Without GPUs, the cores are divided among the workers, and Ray sets each worker's OpenMP threads to its cores. With
    ``workers.count = "auto"``, a worker then gets the cores of the smallest node.

    ``engines``: names of the engines that the worker loads.
    """
    import ray

    jobs, n_workers = [job.with_engine(name) for name in engines], job.workers.least
    gpus: float | None = job.workers.gpus
    if gpus is None:
        groups = [its.engine_gpus for its in jobs if holds_model(its.engine.kind)]
        gpus = max(groups, default=0) if ray.cluster_resources().get("GPU", 0) else 0
    cpus: float | None = job.workers.cpus
    if cpus is None:
        nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
        fair = range(sum(nodes) // n_workers if not gpus else 1, 1, -1)
        cpus = next((n for n in fair if sum(cpu // n for cpu in nodes) >= n_workers), 1)
        if job.workers.is_auto and not gpus:
            cpus = min(filter(None, nodes), default=1)
    return {"num_cpus": cpus, "num_gpus": gpus}


def cause_of(error: Exception) -> str:
    """Return the error's type and the first 300 characters of its message, because Ray's messages fill pages."""
    return shortened(f"{type(error).__name__}: {' '.join(str(error).split())}", 300)
