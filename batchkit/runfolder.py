"""Run folders: which one is meant, who holds it, and how an old one is moved aside."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
from filelock import FileLock, Timeout

from batchkit.errors import JobError, StoreError
from batchkit.types import utc_now

JOB = "job.toml"
MANIFEST = "manifest.json"
_LOCK = ".lock"
_HOLDER = ".holder.json"


@contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Hold ``folder`` for this process; the kernel lets go of it when the process ends.

    Raises:
        StoreError: another process holds it, or the folder can't be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # `status` tries the lock for an instant: wait that long before calling it held.
        lock = FileLock(folder / _LOCK)
        lock.acquire(timeout=0.5)
    except Timeout:
        holder = held_by(folder) or {}
        who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')}"
        raise StoreError(
            f"{folder}: {who} is working in this run folder (since {holder.get('since', '?')});"
            " wait for it, stop it, or give this job another name"
        ) from None
    except OSError as error:
        raise StoreError(f"{folder}: can't be used as a run folder: {error.strerror}") from error
    try:
        _sign(folder)
        yield
    finally:
        (folder / _HOLDER).unlink(missing_ok=True)
        lock.release()


def _sign(folder: Path) -> None:
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": utc_now()}
    try:
        (folder / _HOLDER).write_bytes(orjson.dumps(holder))
    except OSError as error:
        raise StoreError(f"{folder}: can't write: {error.strerror}") from error


def held_by(folder: Path) -> dict[str, Any] | None:
    """Pid, host and start of the process that holds ``folder``, or None."""
    if not (folder / _LOCK).exists():
        return None
    try:
        with FileLock(folder / _LOCK, timeout=0):
            return None
    except Timeout:
        pass
    try:
        holder: dict[str, Any] = orjson.loads((folder / _HOLDER).read_bytes())
    except (OSError, orjson.JSONDecodeError):  # it is just starting or just ending
        return {"pid": None, "host": None, "since": None}
    return holder


def write_atomically(path: Path, content: bytes) -> None:
    """Replace ``path`` so that a reader sees either the old content or all of the new."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Until the names in ``folder`` outlive a power cut."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside ``path`` that takes its name once all went well."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def building(folder: Path) -> Iterator[Path]:
    """A temporary folder beside ``folder`` that takes its name once all went well, else goes."""
    process = f"{socket.gethostname()}-{os.getpid()}"
    temporary = folder.with_name(f".{folder.name}.{process}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    temporary.mkdir(parents=True)
    try:
        yield temporary
        temporary.rename(folder)
        _sync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def is_run(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def move_aside(folder: Path) -> Path:
    """Rename ``folder`` to ``<name>.1``, ``.2`` …, the first that is free."""
    number = 1
    while (free := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(free)
    return free


def latest_run(output: Path) -> Path:
    """The run under ``output`` that was started last.

    Raises:
        JobError: there is none.
    """
    runs = [path.parent for path in output.glob(f"*/{MANIFEST}")]
    if not runs:
        raise JobError(f"no run under {output}/; name a run folder or a job file")
    return max(runs, key=_last_start)


def _last_start(folder: Path) -> str:
    try:
        starts = orjson.loads((folder / MANIFEST).read_bytes())["starts"]
        return str(starts[-1]["started_at"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""
