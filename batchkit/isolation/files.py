"""Asks a process of its own about a file that may crash the library that reads it, or take for ever."""

from __future__ import annotations

import marshal
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from batchkit.isolation import client

_KILLED = -signal.SIGKILL


class Reader(NamedTuple):
    """Who reads a kind of file: the handler's module, what it is for and the ``library`` in it, in words,
    and what to do about a broken file."""

    handler: str
    task: str
    library: str
    remedy: str
    timeout_s: float


class UnreadableFileError(Exception):
    """The file's own fault: it will not be readable next time."""


class FileProcessError(Exception):
    """There was no answer, and another time there may be one."""


def ask_about(reader: Reader, question: Any, memory_bytes: int) -> Any:
    """What ``reader`` answers to ``question``, for which it has ``memory_bytes``.

    Raises:
        UnreadableFileError: it is broken, refused, or needs a password.
        FileProcessError: it takes longer than the reader's ``timeout_s``, or the process was killed.
        EngineError: no process can be started.
    """
    try:
        kind, found = client.ask(
            reader.handler, reader.task, marshal.dumps(question), reader.timeout_s
        )
    except TimeoutError:
        raise FileProcessError(
            f"it takes longer than {reader.timeout_s:g} s; save it anew"
        ) from None
    except client.Gone as gone:
        code = gone.returncode
        if code == _KILLED or code is None or code >= 0:
            raise FileProcessError(
                "the process that reads it was killed twice; is memory short?"
            ) from None
        raise UnreadableFileError(
            f"{reader.library}, which reads it, crashed ({signal.Signals(-code).name}): it is broken, or"
            f" needs more memory than {memory_bytes:,} bytes; {reader.remedy}"
        ) from None
    match kind:
        case "value":
            return found
        case "memory":
            raise UnreadableFileError(f"needs more memory than {memory_bytes:,} bytes")
        case "error":  # what a library raises for a broken file is not documented
            raise UnreadableFileError(f"is broken ({found}); save it anew")
    raise UnreadableFileError(found)


@contextmanager
def placed(data: bytes) -> Iterator[str]:
    """A path at which another process of this user can open ``data`` as a file."""
    descriptor = os.memfd_create("file")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
        yield place_of(descriptor)
    finally:
        os.close(descriptor)


def place_of(descriptor: int) -> str:
    """A name under which another process of this user can open the file."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"
