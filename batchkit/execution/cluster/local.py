"""A private Ray on this machine: its files, access to it, and cleaning up after a dead one."""

from __future__ import annotations

import fcntl
import logging
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from batchkit.config.tables import JobConfig

LONGEST_TMP = 14  # Ray's sockets have long names in it; a socket path has at most 107 bytes
_PREFIX = "batchkit-ray-"
_MARK = "locked-by-its-driver"
_SET_BY_RAY = "RAY_AUTH_MODE"  # and never removed: a child process could join no Ray without tokens
_OBJECT_STORE_BYTES = 512 * 2**20


def begin(job: JobConfig, folder: Path) -> None:
    """Start Ray for this run only. Its files are below ``folder``, because Ray lets all users read and write
    in the folder that it is given. Needs ``on_this_machine_alone``."""
    import ray

    workers, run = job.run.workers or 1, job.run
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, math.ceil(workers * (run.worker_cpus or 1))),
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        logging_level=logging.ERROR,
        log_to_driver=False,
        _temp_dir=str(folder / "ray"),
    )


@contextmanager
def on_this_machine_alone() -> Iterator[None]:
    """Ray started inside listens on 127.0.0.1 and requires a token of this process for every call.

    Ray has no argument for the first, and reads its variable when it is imported. If the program has
    imported it before, what it has read is private: the one name of Ray's own that is set here.
    """
    token = os.environ.get("RAY_AUTH_TOKEN") or _token()  # else one is written to ~
    constants: Any = sys.modules.get("ray._private.ray_constants", SimpleNamespace())
    reachable = getattr(constants, "ENABLE_RAY_CLUSTER", False)
    constants.ENABLE_RAY_CLUSTER = False
    try:
        with _environment({"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_TOKEN": token}):
            yield
    finally:
        constants.ENABLE_RAY_CLUSTER = reachable


@cache
def _token() -> str:
    """One for all Rays that this process starts: Ray's library reads it once."""
    return uuid4().hex


@contextmanager
def private_folder() -> Iterator[Path]:
    """A new folder for Ray's files, removed at the end; folders of killed drivers are removed now.

    This process holds its lock and no child does, so the lock is free once this process is dead. A
    folder without the mark is skipped: it may never have been locked.
    """
    home = Path(tempfile.gettempdir())
    temporary = home if len(str(home)) <= LONGEST_TMP else Path("/tmp")
    for left in temporary.glob(f"{_PREFIX}*"):
        _remove_if_dead(left)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=temporary))
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # no locks on this file system: then no other run removes it
            fcntl.flock(lock, fcntl.LOCK_SH)
            (folder / _MARK).touch()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_if_dead(folder: Path) -> None:
    """Remove ``folder`` if it is this user's, and the driver that made it is dead."""
    with suppress(OSError):  # another user's, removed meanwhile, or its driver is alive
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(lock).st_uid == os.getuid() and (folder / _MARK).exists():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in (*variables, _SET_BY_RAY)}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
