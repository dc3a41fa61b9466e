"""Permanent removal of this process's rights, before it runs the code of a chart that a model wrote.

There are three layers, so that a hole in one layer is covered by another: Landlock (files), seccomp (system calls: no
new process, no network, no access to other processes), and dropped capabilities (which matter if the process runs as
root). The process can still check whether a path exists, and read the clock.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from batchkit.contrib.realhit.chart.seccomp import restrict_calls, seccomp_missing
from batchkit.isolation.child import prctl

_CAPABILITY_VERSION_3 = 0x20080522
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")
_SYSTEM = (
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/usr/share/zoneinfo",
    "/usr/share/fonts",
    "/usr/local/share/fonts",
    "/dev/urandom",
)
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1
_PR_SET_NO_NEW_PRIVS = 38

_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
_MAKE_REG, _TRUNCATE = 1 << 8, 1 << 14
_OF_FILES = _WRITE_FILE | _READ_FILE | _TRUNCATE | 1  # 1: execute
# All access rights that each Landlock version knows, as bits. ``restrict_files`` refuses those that it does not grant.
_ACCESS_FS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_ACCESS_NET = {4: 0b11}
_SCOPED = {6: 0b11}


def what_is_missing() -> str | None:
    """Return what this machine lacks for confining a process; None if it lacks nothing. The process is not changed."""
    if sys.platform != "linux":
        return f"the sandbox needs Linux (Landlock and seccomp), but this is {sys.platform}"
    return landlock_missing() or seccomp_missing()


def confine(*, readable: Path, writable: Path) -> None:
    """Restrict this process, which must have only one thread. Afterwards, it can read only files below ``readable`` and
    ``writable``, and files that Python needs. It can write only files in ``writable``, and /dev/null.

    Raises:
        OSError: A layer could not be set up. The caller must not run any code, and layers that were set up before stay
            active.
    """
    restrict_files(
        readable=[readable, *map(Path, _SYSTEM), *_python()],
        files_writable_in=writable,
        writable_file=Path(os.devnull),
    )
    _drop_capabilities()
    restrict_calls()


def _python() -> Iterator[Path]:
    """Yield the folders of Python's modules and libraries. Their parent folders are left out, because one of these may
    be a user's home folder."""
    paths = sysconfig.get_paths()
    yield from {Path(paths[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    for entry in map(Path, sys.path):
        if entry.name in ("site-packages", "dist-packages", "lib-dynload"):
            yield entry
    yield from map(Path, _LIBRARIES)


def _drop_capabilities() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    if libc.capset(header, (ctypes.c_uint32 * 6)()) != 0:
        raise OSError(ctypes.get_errno(), "capset failed")


def landlock_missing() -> str | None:
    """Return why the kernel does not support Landlock, or None if it does."""
    if _version() >= 1:
        return None
    return (
        "this kernel has no Landlock (it needs Linux 5.13 or later, with landlock among the modules"
        " of /sys/kernel/security/lsm, and a container that allows its system calls)"
    )


def restrict_files(
    *, readable: Iterable[Path], files_writable_in: Path, writable_file: Path
) -> None:
    """Deny this process access to all files except ``writable_file``, and files in or below ``readable`` and
    ``files_writable_in``.

    In ``files_writable_in``, files can be created, read and written, but not removed. Paths that do not exist are
    skipped.

    Raises:
        OSError: The kernel refused.
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
    """Return the version of Landlock, or 0 if the kernel has no Landlock."""
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
