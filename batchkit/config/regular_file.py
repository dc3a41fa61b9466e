"""Opening a path that must be a file: a pipe would block, a device may never end, and a file of any size may
stand where a small one is expected."""

from __future__ import annotations

import errno
import io
import os
import stat
from contextlib import suppress
from pathlib import Path

MOST_BYTES = 64 << 20  # of a file that is read as a whole
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

# For a text that may be a name: one that is too long for a name is False, or in a folder that may not be
# searched. Path's methods raise then.
exists, is_file, is_dir = os.path.exists, os.path.isfile, os.path.isdir


def descriptor_of(path: str | Path, flags: int) -> int:
    """A descriptor of the file at ``path``, which ``flags`` may create. Never blocks.

    Raises:
        OSError: as ``os.open``; or it is a folder, a pipe, a socket or a device, as ``strerror`` says.
    """
    with suppress(FileNotFoundError):  # before opening: opening alone can have side effects
        _check(Path(path).stat(follow_symlinks=not flags & os.O_NOFOLLOW).st_mode, path)
    # O_NONBLOCK: the path may have been replaced since the check.
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        _check(os.fstat(descriptor).st_mode, path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def open_regular(path: str | Path) -> io.FileIO:
    """The file at ``path``, for reading bytes. Raises OSError as ``descriptor_of``."""
    return io.FileIO(descriptor_of(path, os.O_RDONLY))


def read_bytes(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """The content of a file. Raises OSError as ``open_regular``; or it has more than ``most`` bytes."""
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            reason = f"it has {size:,} bytes, and at most {most:,} are read"
            raise OSError(None, reason, str(path))
        return file.readall()


def read_text(path: str | Path) -> str:
    """The text of a file in UTF-8, without its byte order mark. Raises UnicodeDecodeError too."""
    return read_bytes(path).decode("utf-8-sig")


def _check(mode: int, path: str | Path) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if kind := _KINDS.get(stat.S_IFMT(mode)):
        reason = f"it is {kind}, not a file; save the content as a file and give its path"
        raise OSError(None, reason, str(path))
