"""A seccomp filter that allows only a list of system calls (man 2 seccomp).

New system calls of later kernels are not in the list, so they are refused, too. A refused call fails with EPERM, which
Python shows as a readable PermissionError.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from batchkit.isolation.child import prctl

_PR_GET_SECCOMP, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 21, 22, 38
_MODE_FILTER = 2
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _AND, _EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06  # 32-bit, absolute
_AT_NUMBER, _AT_ARCHITECTURE, _AT_ARGUMENTS = 0, 4, 16  # in struct seccomp_data

_O_TMPFILE_BIT = 0x400000
_O_TRUNC_OR_WRITE = os.O_TRUNC | os.O_ACCMODE


class _Call(NamedTuple):
    x86_64: int | None
    aarch64: int | None


class _Condition(NamedTuple):
    """A condition on one 32-bit half of a system call's argument. BPF loads only 32 bits at a time.

    - ``argument``: number of the argument, from 0.
    - ``half``: 0 for the low half, 1 for the high half.
    - ``mask``: applied to the half before it is compared.
    - ``equal``: True if the masked half must equal ``value``, False if it must differ.
    """

    argument: int
    mask: int
    value: int
    equal: bool = True
    half: int = 0


# Call numbers from asm/unistd_64.h and asm-generic/unistd.h.
_ALWAYS = {
    "read": _Call(0, 63),
    "write": _Call(1, 64),
    "close": _Call(3, 57),
    "stat": _Call(4, None),
    "fstat": _Call(5, 80),
    "lstat": _Call(6, None),
    "poll": _Call(7, None),
    "lseek": _Call(8, 62),
    "mmap": _Call(9, 222),
    "mprotect": _Call(10, 226),
    "munmap": _Call(11, 215),
    "brk": _Call(12, 214),
    "rt_sigaction": _Call(13, 134),
    "rt_sigprocmask": _Call(14, 135),
    "rt_sigreturn": _Call(15, 139),
    "pread64": _Call(17, 67),
    "pwrite64": _Call(18, 68),
    "readv": _Call(19, 65),
    "writev": _Call(20, 66),
    "access": _Call(21, None),
    "pipe": _Call(22, None),
    "select": _Call(23, None),
    "sched_yield": _Call(24, 124),
    "mremap": _Call(25, 216),
    "mincore": _Call(27, 232),
    "madvise": _Call(28, 233),
    "dup": _Call(32, 23),
    "dup2": _Call(33, None),
    "nanosleep": _Call(35, 101),
    "getpid": _Call(39, 172),
    "exit": _Call(60, 93),
    "uname": _Call(63, 160),
    "fsync": _Call(74, 82),
    "fdatasync": _Call(75, 83),
    "ftruncate": _Call(77, 46),
    "getcwd": _Call(79, 17),
    "chdir": _Call(80, 49),
    "fchdir": _Call(81, 50),
    "readlink": _Call(89, None),
    "umask": _Call(95, 166),
    "gettimeofday": _Call(96, 169),
    "getrlimit": _Call(97, 163),
    "getrusage": _Call(98, 165),
    "sysinfo": _Call(99, 179),
    "times": _Call(100, 153),
    "getuid": _Call(102, 174),
    "getgid": _Call(104, 176),
    "geteuid": _Call(107, 175),
    "getegid": _Call(108, 177),
    "getppid": _Call(110, 173),
    "sigaltstack": _Call(131, 132),
    "statfs": _Call(137, 43),
    "fstatfs": _Call(138, 44),
    "gettid": _Call(186, 178),
    "time": _Call(201, None),
    "futex": _Call(202, 98),
    "sched_getaffinity": _Call(204, 123),
    "getdents64": _Call(217, 61),
    "restart_syscall": _Call(219, 128),
    "fadvise64": _Call(221, 223),
    "clock_gettime": _Call(228, 113),
    "clock_getres": _Call(229, 114),
    "clock_nanosleep": _Call(230, 115),
    "exit_group": _Call(231, 94),
    "newfstatat": _Call(262, 79),
    "readlinkat": _Call(267, 78),
    "faccessat": _Call(269, 48),
    "pselect6": _Call(270, 72),
    "ppoll": _Call(271, 73),
    "set_robust_list": _Call(273, 99),
    "fallocate": _Call(285, 47),
    "dup3": _Call(292, 24),
    "pipe2": _Call(293, 59),
    "getcpu": _Call(309, 168),
    "getrandom": _Call(318, 278),
    "membarrier": _Call(324, 283),
    "statx": _Call(332, 291),
    "rseq": _Call(334, 293),
    "close_range": _Call(436, 436),
    "faccessat2": _Call(439, 439),
}
_OPEN, _OPENAT = _Call(2, None), _Call(257, 56)
_IOCTL, _FCNTL = _Call(16, 29), _Call(72, 25)
_CLONE, _CLONE3 = _Call(56, 220), _Call(435, 435)
_TGKILL, _PRCTL, _PRLIMIT = _Call(234, 131), _Call(157, 167), _Call(302, 261)

_CLONE_THREAD = 0x10000
_PR_SET_NAME, _PR_GET_NAME = 15, 16
# TCGETS, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX.
_IOCTLS = (0x5401, 0x541B, 0x5421, 0x5450, 0x5451)
# F_DUPFD … F_SETLKW, F_DUPFD_CLOEXEC; not F_SETOWN or leases.
_FCNTLS = (0, 1, 2, 3, 4, 5, 6, 7, 1030)

_AUDIT_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def seccomp_missing() -> str | None:
    """Return why the kernel does not support the filter, or None if it does."""
    if platform.machine() not in _AUDIT_ARCHITECTURE:
        return f"the sandbox supports the system calls of x86_64 and aarch64, not of {platform.machine()}"
    try:
        prctl(_PR_GET_SECCOMP)
    except OSError:
        return "this kernel has no seccomp (CONFIG_SECCOMP_FILTER)"
    return None


def restrict_calls() -> None:
    """Allow this process and its future threads only the system calls listed in this file.

    Raises:
        OSError: The kernel refused.
    """
    program = b"".join(_program(platform.machine(), os.getpid()))
    code = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    prctl(_PR_SET_SECCOMP, _MODE_FILTER, head)


def _program(machine: str, pid: int) -> Iterator[bytes]:
    """Yield the filter's classic BPF instructions. At the end, a call that no rule allows is refused.

    A call of the 32-bit system interface kills the process, because the same number means another call there. Calls of
    the x32 interface have numbers that no rule allows.
    """
    yield _instruction(_LOAD, _AT_ARCHITECTURE)
    yield _instruction(_EQUAL, _AUDIT_ARCHITECTURE[machine], 1, 0)
    yield _instruction(_RETURN, _KILL)
    yield _instruction(_LOAD, _AT_NUMBER)
    for call in _ALWAYS.values():
        yield from _rule(_number(call, machine), [])
    for call, conditions in _conditional(pid):
        yield from _rule(_number(call, machine), conditions)
    # Report clone3 as missing, so that the C library starts threads with clone: the filter can read its
    # flags.
    yield from _rule(_number(_CLONE3, machine), [], _ERRNO | errno.ENOSYS)
    yield _instruction(_RETURN, _ERRNO | errno.EPERM)


def _conditional(pid: int) -> Iterator[tuple[_Call, list[_Condition]]]:
    # Refused: O_TRUNC without write access, because Landlock checks truncation only from version 3 on; and O_TMPFILE,
    # because files without a name would not count against the limit on files.
    for call, flags in ((_OPEN, 1), (_OPENAT, 2)):
        yield (
            call,
            [
                _Condition(flags, _O_TMPFILE_BIT, 0),
                _Condition(flags, _O_TRUNC_OR_WRITE, os.O_TRUNC, equal=False),
            ],
        )
    yield _CLONE, [_Condition(0, _CLONE_THREAD, _CLONE_THREAD)]
    yield _TGKILL, [_Condition(0, 0xFFFFFFFF, pid)]  # needed by abort() and raise()
    yield (
        _PRLIMIT,
        [  # allows reading limits only: both halves of the pointer to a new limit must be 0
            _Condition(2, 0xFFFFFFFF, 0),
            _Condition(2, 0xFFFFFFFF, 0, half=1),
        ],
    )
    for name in (_PR_SET_NAME, _PR_GET_NAME):
        yield _PRCTL, [_Condition(0, 0xFFFFFFFF, name)]
    for request in _IOCTLS:
        yield _IOCTL, [_Condition(1, 0xFFFFFFFF, request)]
    for command in _FCNTLS:
        yield _FCNTL, [_Condition(1, 0xFFFFFFFF, command)]


def _rule(
    number: int | None, conditions: Iterable[_Condition], action: int = _ALLOW
) -> Iterator[bytes]:
    """Yield instructions that apply ``action`` to the call ``number`` if all ``conditions`` are met. Other calls are
    left to later rules.

    At the start of each rule, the accumulator holds the number of the current call. If ``number`` is None, because this
    machine does not have the call, nothing is yielded.
    """
    if number is None:
        return
    body = [_instruction(_RETURN, action)]
    for condition in list(conditions)[::-1]:
        load = _instruction(_LOAD, _AT_ARGUMENTS + 8 * condition.argument + 4 * condition.half)
        skip = len(body)
        taken, refused = (0, skip) if condition.equal else (skip, 0)
        body = [
            load,
            _instruction(_AND, condition.mask),
            _instruction(_EQUAL, condition.value, taken, refused),
            *body,
        ]
    if len(body) > 1:
        body.append(_instruction(_LOAD, _AT_NUMBER))
    yield _instruction(_EQUAL, number, 0, len(body))
    yield from body


def _number(call: _Call, machine: str) -> int | None:
    return call.x86_64 if machine == "x86_64" else call.aarch64


def _instruction(code: int, constant: int, true: int = 0, false: int = 0) -> bytes:
    return struct.pack("@HBBI", code, true, false, constant)
