"""A Ray of the run's own, on this machine: where its files are, who can reach it, what a dead one left."""

from __future__ import annotations

import fcntl
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from batchkit.config.tables import JobConfig

LONGEST_TMP = 16  # Ray's sockets have long names below it, and 107 bytes are all that they may have
_PREFIX = "batchkit-ray-"
_MARK = "locked-by-its-driver"
_OBJECT_STORE_BYTES = 512 * 2**20


def begin(job: JobConfig, folder: Path) -> None:
    """Ray for this run alone, its files in ``folder``. Needs ``on_this_machine_alone``."""
    import ray

    workers, run = job.run.workers or 1, job.run
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, math.ceil(workers * (run.worker_cpus or 1))),
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        logging_level=logging.ERROR,
        log_to_driver=False,
        _temp_dir=str(folder),
    )


@contextmanager
def on_this_machine_alone() -> Iterator[None]:
    """Ray begun meanwhile listens on 127.0.0.1, and takes no call without a token of this run.

    Ray has no argument for it: ``_node_ip_address="127.0.0.1"`` it replaces by an outer address. Its
    variable is read as Ray is imported, here, and as its processes start.
    """
    from ray._private import ray_constants

    variables = {
        ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0",
        "RAY_AUTH_TOKEN": os.environ.get("RAY_AUTH_TOKEN", uuid4().hex),  # else one is left at home
    }
    reachable = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        with _environment(variables):
            yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = reachable


@contextmanager
def private_folder() -> Iterator[Path]:
    """A new folder for Ray's files; it goes at the end, and those of drivers that were killed go now.

    This process holds its lock and no child does, so the lock is free once this process is dead. A
    folder without the mark is not looked at: it may be one that was never locked.
    """
    home = Path(tempfile.gettempdir())
    temporary = home if len(str(home)) <= LONGEST_TMP else Path("/tmp")
    for left in temporary.glob(f"{_PREFIX}*"):
        _remove_if_dead(left)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=temporary))
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system without locks: then nobody removes it
            fcntl.flock(lock, fcntl.LOCK_SH)
            (folder / _MARK).touch()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_if_dead(folder: Path) -> None:
    """Remove ``folder`` if it is this user's, and the driver that made it is dead."""
    with suppress(OSError):  # another's, gone meanwhile, or its driver lives
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(lock).st_uid == os.getuid() and (folder / _MARK).exists():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
