"""File operations that never leave half a file or write through a symbolic link; temporary folders."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from glob import escape
from itertools import count
from pathlib import Path
from typing import BinaryIO

from batchkit.config.regular_file import descriptor_of
from batchkit.errors import StoreError


def open_private(path: Path, flags: int) -> int:
    """Open a file in a run folder and return its descriptor. A symbolic link is refused.

    Raises:
        OSError: ``path`` is a symbolic link, is no regular file, or can't be opened.
    """
    try:
        return descriptor_of(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            error.strerror = "is a symbolic link; batchkit does not write through links"
        raise


@contextmanager
def disk_errors(path: Path, what: str = "can't write", advice: str = "") -> Iterator[None]:
    """Turn an OSError inside the block into a StoreError with the message ``path: what: reason`` and ``advice``."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{path}: {what}: {error.strerror or error}{advice}") from error


def open_log(path: Path) -> BinaryIO:
    """Return a file opened for appending.

    Raises:
        StoreError: the file can't be written.
    """
    with disk_errors(path):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        return os.fdopen(open_private(path, flags), "ab")


def write_all(file: int, block: bytes | memoryview) -> None:
    """Write all of ``block`` to the descriptor ``file``. ``os.write`` is repeated as long as it writes only a part.

    Raises:
        OSError: the disk fails; a part of the block may have been written.
    """
    rest = memoryview(block)
    while rest:
        rest = rest[os.write(file, rest) :]


def is_same_file(path: Path, file: int, size: int) -> bool:
    """Return whether ``path`` is still the file of the descriptor ``file`` and has ``size`` bytes."""
    try:
        there = path.lstat()
    except OSError:
        return False
    return os.path.samestat(os.fstat(file), there) and there.st_size == size


def write_atomically(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Replace ``path`` so that a reader sees either the old content or all of the new content.

    ``content`` may be an iterable of parts, and may be read from ``path`` itself. Only the process that holds the
    folder may call this, because the name of the temporary file is fixed.
    """
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # left by a killed process, or placed by an attacker
    with open(open_private(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        file.writelines([content] if isinstance(content, bytes) else content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Call fsync on ``folder``, so that new and renamed files in it survive a power cut.

    Some network and FUSE filesystems don't support this and answer EINVAL or EBADF. These errors are ignored, as in
    PostgreSQL's ``fsync_fname``.
    """
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF):
            raise
    finally:
        os.close(opened)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file next to ``path``; rename it to ``path`` on success, otherwise remove it."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        os.close(open_private(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def building(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder next to ``folder``; rename it to ``folder`` on success, otherwise remove it.

    Also removes temporary folders that killed processes have left.
    """
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.tmp")
    for left in folder.parent.glob(f".{escape(folder.name)}.{'[0-9a-f]' * 16}.tmp"):
        if not _is_held(left):
            shutil.rmtree(left, ignore_errors=True)
    temporary.mkdir(parents=True)
    opened = os.open(temporary, os.O_RDONLY)
    try:
        with suppress(OSError):  # not every filesystem has locks
            fcntl.flock(opened, fcntl.LOCK_SH)
        yield temporary
        temporary.rename(folder)
        sync_folder(folder.parent)
    finally:
        os.close(opened)
        shutil.rmtree(temporary, ignore_errors=True)


def _is_held(folder: Path) -> bool:
    try:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return True
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(opened)
    return False


def cache_folder(name: str) -> Path:
    """Return batchkit's folder ``name`` among the user's caches. It may not exist.

    Raises:
        RuntimeError: the user has no home folder.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    return caches / "batchkit" / name


def free_name(path: Path, infix: str) -> Path:
    """Return ``<path><infix><n>`` with the first free n, counting from 1."""
    numbered = (path.with_name(f"{path.name}{infix}{n}") for n in count(1))
    return next(free for free in numbered if not free.exists())


OWNER = ".owner"
# Searched in addition to this process's temporary folder, whose name may be too long for Ray.
HOMES = ("/tmp",)


class OwnFolder:
    """A new temporary folder ``batchkit-KIND-…``, removed by ``close``.

    The folder has a file that this process and its forks lock while they live. ``remove_orphans`` keeps folders whose
    file is locked.
    """

    def __init__(self, kind: str, home: str | None = None) -> None:
        made = Path(tempfile.mkdtemp(prefix=f".batchkit-{kind}-", dir=home))
        self._lock = open_private(made / OWNER, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # The folder gets its final name after it is locked, because ``remove_orphans`` removes unlocked folders.
        self.path = made.rename(made.with_name(made.name[1:]))

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_orphans(before: Callable[[Path], None] = lambda folder: None) -> None:
    """Remove the temporary folders of processes that have died. ``before``: called with each folder before that."""
    for home in {tempfile.gettempdir(), *HOMES}:
        for owner in Path(home).glob(f"batchkit-*/{OWNER}"):
            with suppress(OSError):  # the owner is alive, or is another user
                lock = open_private(owner, os.O_RDWR)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    before(owner.parent)
                    shutil.rmtree(owner.parent, ignore_errors=True)
                finally:
                    os.close(lock)
