"""Permanently removes every right that a chart's code doesn't need from the calling process.

Three layers, in case one has a hole: Landlock (files), seccomp (system calls: no new process, no
network, no access to other processes), and no capabilities, even for root. Still possible: to see
that a path exists, and to read the clock.
"""

from __future__ import annotations

import ctypes
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from batchkit.isolation.landlock import landlock_missing, restrict_files
from batchkit.isolation.seccomp import restrict_calls, seccomp_missing

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


def what_is_missing() -> str | None:
    """What this machine lacks to confine a process, None if it lacks nothing. Changes nothing."""
    if sys.platform != "linux":
        return f"the sandbox needs Linux (Landlock and seccomp), this is {sys.platform}"
    return landlock_missing() or seccomp_missing()


def confine(*, readable: Path, writable: Path) -> None:
    """From now on this process, which must have one thread, may only read below ``readable`` and
    what Python needs, and write files in ``writable``.

    Raises:
        OSError: a layer could not be set up. Those that were stay in force: run nothing.
    """
    restrict_files(
        readable=[readable, *map(Path, _SYSTEM), *_python()],
        files_writable_in=writable,
        writable_file=Path(os.devnull),
    )
    _drop_capabilities()
    restrict_calls()


def _python() -> Iterator[Path]:
    """The folders of Python's modules and their libraries; not the parents, which may be a home."""
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
