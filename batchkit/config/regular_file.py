"""Functions that open regular files only, because reading a pipe may block and reading a device may never end. The size
of a file that is read as a whole is limited."""

from __future__ import annotations

import errno
import io
import os
import stat
from contextlib import suppress
from pathlib import Path

MOST_BYTES = 64 << 20  # maximum size of a file that is read into memory
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

# Safe for a text that may not be a path: if the name is too long, or a folder has no search permission, these functions
# return False, while Path's methods raise.
exists, is_file, is_dir = os.path.exists, os.path.isfile, os.path.isdir


def descriptor_of(path: str | Path, flags: int) -> int:
    """Open ``path`` and return its descriptor; never blocks. With ``os.O_CREAT`` in ``flags``, a missing file is
    created.

    Raises:
        OSError: ``os.open`` fails, or the path is a folder, pipe, socket or device. ``strerror`` gives the reason.
    """
    # Check before opening: opening a device can have side effects.
    with suppress(FileNotFoundError):
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
    """Open ``path`` for reading bytes. Raises OSError like ``descriptor_of``."""
    return io.FileIO(descriptor_of(path, os.O_RDONLY))


def read_bytes(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a file. Raises OSError like ``open_regular``, or if the file has more than ``most``
    bytes."""
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            reason = f"it has {size:,} bytes; the maximum is {most:,}"
            raise OSError(None, reason, str(path))
        return file.readall()


def read_text(path: str | Path) -> str:
    """Return the text of a UTF-8 file without its byte order mark. Raises OSError like ``read_bytes``, or
    UnicodeDecodeError."""
    return read_bytes(path).decode("utf-8-sig")


def _check(mode: int, path: str | Path) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if kind := _KINDS.get(stat.S_IFMT(mode)):
        reason = f"it is {kind}, not a file; save the content as a file and give its path"
        raise OSError(None, reason, str(path))
