"""Run folders: finding the one to use, locking it, and moving an old one aside."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from errno import EACCES, EEXIST, ELOOP, ENAMETOOLONG, ENOENT, ENOTDIR, EPERM, EROFS
from pathlib import Path
from typing import Any, cast

import orjson
from filelock import FileLock, Timeout

from batchkit.config.regular_file import read_bytes
from batchkit.errors import JobError, LostLockError, StoreError
from batchkit.storage.files import disk_errors, free_name, open_private, write_atomically
from batchkit.types import utc_now

JOB = "job.toml"
MANIFEST = "manifest.json"
LOCK = ".lock"
LOG = "run.log"
IN_STORE = ".store.json"  # only in a copy of a run that is in a store: who holds it there
_HOLDER = ".holder.json"
# Errors that another try would not remove.
_REFUSED = (EACCES, EPERM, EROFS, EEXIST, ENOENT, ENOTDIR, ENAMETOOLONG, ELOOP)


def is_of_run(job_file: Path) -> bool:
    """Return whether ``job_file`` is the ``job.toml`` of a run folder."""
    return job_file.name == JOB and is_run(job_file.parent)


class Claim:
    """The lock that this process holds on a run folder. The lock is lost if its lock file is removed or replaced.

    ``lost_because``: returns why the folder must not be written any more for another reason, or "".
    """

    def __init__(self, folder: Path, lock: FileLock) -> None:
        self.lost_because: Callable[[], str] = str
        self._lock = folder / LOCK
        # Filelock has no public name for the descriptor.
        self._locked = os.fstat(cast(int, lock._context.lock_file_fd))

    @property
    def is_lost(self) -> bool:
        """True if the lock file was removed or replaced, so that its path has another inode number, or if
        ``lost_because`` says so.

        While this process has the lock file open, no other file gets its inode number.
        """
        if self.lost_because():
            return True
        try:
            return not os.path.samestat(self._lock.lstat(), self._locked)
        except OSError:
            return True

    def check(self) -> None:
        """Raise an error if the lock is lost, because another process could then use the folder. Call this before each
        write.

        Raises:
            LostLockError: the lock file was removed or replaced, or another machine has taken the run over.
        """
        if why := self.lost_because():
            raise LostLockError(why)
        if self.is_lost:
            raise LostLockError(
                f"{self._lock}: was removed while this run worked, so another process may be"
                " working in the run folder now; this run stops without writing more. If no"
                " other process works there, run the same command again"
            )


@contextmanager
def claim(folder: Path) -> Iterator[Claim]:
    """Lock ``folder`` for this process, so that no other process works in it. The kernel releases the lock of a dead
    process.

    Raises:
        JobError: the folder can't be created or written to.
        StoreError: another process holds the folder, or the disk fails.
    """
    try:
        lock = FileLock(folder / LOCK)
        held = _locked(folder, lock)
        if held.is_lost:  # the folder was moved aside after the file was opened
            lock.release()
            held = _locked(folder, lock)
    except Timeout:
        raise StoreError(_refusal(folder, held_by(folder) or {})) from None
    except OSError as error:
        if error.errno in _REFUSED:
            is_there = os.path.lexists(folder / MANIFEST)  # False, not an error, without permission
            or_copy = ", or name a copy of the run in such a folder" * is_there
            raise JobError(
                f"{folder}: can't be used as a run folder: {error.strerror}; set output.dir to a folder"
                f" that you may write to{or_copy}"
            ) from error
        place = error.filename or folder
        raise StoreError(
            f"{place}: can't be used for a run: {error.strerror}; set output.dir to another folder"
        ) from error
    try:
        held.check()
        _sign(folder)
        yield held
    finally:
        # The holder file is ignored once the lock is released.
        with suppress(LostLockError, OSError):
            held.check()  # raises if another process may have written its own holder file
            (folder / _HOLDER).unlink(missing_ok=True)
        lock.release()


def _refusal(folder: Path, holder: Mapping[str, Any]) -> str:
    since = holder.get("since") or "a moment ago"
    advice = "wait for it, stop it, or give this job another name"
    here = socket.gethostname()  # on this machine the kernel releases the locks of dead processes
    if holder.get("host") not in (None, here):
        advice += f". If that machine is gone, remove {folder / LOCK}"
    return f"{folder}: {named(holder)} is working in this run folder (since {since}); {advice}"


def named(holder: Mapping[str, Any]) -> str:
    """Return a text that names the process ``holder`` (see ``held_by``) in a message."""
    if holder.get("pid") is None:
        return "another process"
    return f"process {holder['pid']} on {holder['host']}"


def _locked(folder: Path, lock: FileLock) -> Claim:
    folder.mkdir(parents=True, exist_ok=True)
    # Fails for a pipe or a link, which filelock would follow.
    os.close(open_private(folder / LOCK, os.O_RDWR | os.O_CREAT))
    # `status` takes the lock for an instant: wait that long before reporting it as held.
    lock.acquire(timeout=0.5)
    return Claim(folder, lock)


def _sign(folder: Path) -> None:
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": utc_now()}
    with disk_errors(folder):
        write_atomically(folder / _HOLDER, orjson.dumps(holder))


def held_by(folder: Path) -> dict[str, Any] | None:
    """Return pid, host and start time of the process that holds ``folder``; None if no process holds it.

    This writes nothing, so that it also works in a folder that is mounted read-only.
    """
    try:
        lock = open_private(folder / LOCK, os.O_RDONLY)
    except OSError:
        return _held_in_store(folder)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except OSError:
        pass
    finally:
        os.close(lock)
    try:
        holder: dict[str, Any] = orjson.loads(read_bytes(folder / _HOLDER))
    except (OSError, orjson.JSONDecodeError):  # the holder is just starting or just ending
        return {"pid": None, "host": None, "since": None}
    return holder


def _held_in_store(folder: Path) -> dict[str, Any] | None:
    try:
        held: dict[str, Any] | None = orjson.loads(read_bytes(folder / IN_STORE))["held_by"]
    except (OSError, orjson.JSONDecodeError):
        return None
    return held


def is_run(folder: Path) -> bool:
    return os.path.lexists(folder / MANIFEST)  # False without permission to look


def move_aside(folder: Path) -> Path:
    """Rename ``folder`` to the first free name of ``<name>.1``, ``.2`` …

    Raises:
        StoreError: the folder can't be renamed, for example because it is a mount point.
    """
    free = free_name(folder, ".")
    advice = "; move its files to another folder, or give the job another name"
    with disk_errors(folder, f"can't be moved aside to {free}", advice):
        folder.rename(free)
    return free
