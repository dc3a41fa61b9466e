"""Opening a path that must be a file: a pipe would block, and a device may never end."""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

# For a text that may be a name: one that is too long for a name is False, or in a folder that may not be
# searched. Path's methods raise then.
exists, is_file, is_dir = os.path.exists, os.path.isfile, os.path.isdir


def open_regular(path: str | Path) -> io.FileIO:
    """The file at ``path``, for reading bytes.

    Raises:
        OSError: as ``open``; or it is a pipe, a socket or a device, as ``strerror`` says.
    """
    _check(Path(path).stat().st_mode, path)  # before opening: opening alone can have side effects
    # O_NONBLOCK: the path may have been replaced since the check.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    file = io.FileIO(descriptor)  # refuses a folder
    try:
        _check(os.fstat(descriptor).st_mode, path)
    except OSError:
        file.close()
        raise
    return file


def read_text(path: str | Path) -> str:
    """The text of a file in UTF-8, without its byte order mark. Raises UnicodeDecodeError too."""
    with open_regular(path) as file:
        return file.readall().decode("utf-8-sig")


def _check(mode: int, path: str | Path) -> None:
    if kind := _KINDS.get(stat.S_IFMT(mode)):
        reason = f"it is {kind}, not a file; save the content as a file and give its path"
        raise OSError(None, reason, str(path))
