"""Landlock: a process gives up file access (https://docs.kernel.org/userspace-api/landlock.html).

Called by number: the C library has no functions for it; the numbers are equal on all architectures.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable
from pathlib import Path

from batchkit.isolation.child import prctl

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1
_PR_SET_NO_NEW_PRIVS = 38

_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
_MAKE_REG, _TRUNCATE = 1 << 8, 1 << 14
_OF_FILES = _WRITE_FILE | _READ_FILE | _TRUNCATE | 1  # 1: execute
# By version, all rights that it knows: what is not granted below is refused.
_ACCESS_FS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_ACCESS_NET = {4: 0b11}
_SCOPED = {6: 0b11}


def landlock_missing() -> str | None:
    """Why the kernel can't do it, None if it can."""
    if _version() >= 1:
        return None
    return (
        "this kernel has no Landlock (it needs Linux 5.13 or later, with landlock among the modules"
        " of /sys/kernel/security/lsm, and a container that allows its system calls)"
    )


def restrict_files(
    *, readable: Iterable[Path], files_writable_in: Path, writable_file: Path
) -> None:
    """Deny this process all files except ``writable_file`` and those at and below ``readable`` and
    ``files_writable_in``.

    In the latter, files can be created and written, not removed. Missing paths are skipped.

    Raises:
        OSError: the kernel refused.
    """
    version = _version()
    handled = _known(_ACCESS_FS, version)
    attributes = struct.pack(
        "<QQQ", handled, _known(_ACCESS_NET, version), _known(_SCOPED, version)
    )
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = _call(_CREATE_RULESET, attributes, size, 0)
    try:
        for path in readable:
            _allow(ruleset, path, handled & (_READ_FILE | _READ_DIR))
        writing = _READ_FILE | _WRITE_FILE | _TRUNCATE
        _allow(ruleset, writable_file, handled & writing)
        _allow(ruleset, files_writable_in, handled & (writing | _READ_DIR | _MAKE_REG))
        prctl(_PR_SET_NO_NEW_PRIVS, 1)
        _call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


_libc = ctypes.CDLL(None, use_errno=True)


def _version() -> int:
    """Landlock's version; 0 if there is none."""
    return max(0, int(_libc.syscall(_CREATE_RULESET, None, 0, _CREATE_RULESET_VERSION)))


def _known(by_version: dict[int, int], version: int) -> int:
    return max((mask for since, mask in by_version.items() if since <= version), default=0)


def _allow(ruleset: int, path: Path, access: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not path.is_dir():
            access &= _OF_FILES
        _call(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, struct.pack("<Qi", access, fd), 0)
    finally:
        os.close(fd)


def _call(number: int, *arguments: int | bytes) -> int:
    typed = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    result = int(_libc.syscall(number, *typed))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"Landlock refused: {os.strerror(error)}")
    return result
