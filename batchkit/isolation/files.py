"""Asks a process of its own about a file that may crash the library that reads it, or take for ever: a PDF, sound or
video."""

from __future__ import annotations

import marshal
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple

from batchkit.config.installation import how_to_install
from batchkit.isolation import client

_KILLED = -signal.SIGKILL


class UnreadableFileError(Exception):
    """The file's own fault: it will not be readable next time."""


class FileProcessError(Exception):
    """There was no answer, and another time there may be one."""


class Reader(NamedTuple):
    """Who reads a kind of file: the handler's module, what it is for and the ``library`` in it, in words,
    what to do about a broken file, and the package that it needs, with its import, its extra and who needs it."""

    handler: str
    task: str
    library: str
    remedy: str
    package: tuple[str, str, str]
    timeout_s: float = 60.0

    @property
    def missing(self) -> str | None:
        """What to install, if such files can't be read here."""
        module, extra, need = self.package
        return None if find_spec(module) is not None else f"{need}: {how_to_install(extra)}"

    def ask(
        self, place: str, memory_bytes: int, what: str, *arguments: Any, seconds: float = 0
    ) -> Any:
        """The handler's answer about the file at ``place``, for which it has ``memory_bytes``, and ``seconds`` more
        than usual.

        Raises:
            UnreadableFileError: it is broken, refused, or needs a password.
            FileProcessError: it takes longer than that, or the process was killed.
            EngineError: no process can be started.
        """
        question, limit_s = (what, place, arguments, memory_bytes), self.timeout_s + seconds
        try:
            kind, found = client.ask(self.handler, self.task, marshal.dumps(question), limit_s)
        except TimeoutError:
            raise FileProcessError(f"it takes longer than {limit_s:g} s; save it anew") from None
        except client.Gone as gone:
            code = gone.returncode
            if code == _KILLED or code is None or code >= 0:
                raise FileProcessError(
                    "the process that reads it was killed twice; is memory short?"
                ) from None
            raise UnreadableFileError(
                f"{self.library}, which reads it, crashed ({signal.Signals(-code).name}): it is broken, or"
                f" needs more memory than {memory_bytes:,} bytes; {self.remedy}"
            ) from None
        match kind:
            case "value":
                return found
            case "memory":
                raise UnreadableFileError(f"needs more memory than {memory_bytes:,} bytes")
            case "error":  # what a library raises for a broken file is not documented
                raise UnreadableFileError(f"is broken ({found}); save it anew")
        raise UnreadableFileError(found)


PDF_READER = Reader(
    "batchkit.isolation.pdf_child",
    "reading PDFs",
    "PDFium",
    "save it anew, for example by printing it to a PDF",
    ("pypdfium2", "pdf", "a PDF needs pypdfium2"),
)
CLIP_READER = Reader(
    "batchkit.isolation.clip_child",
    "decoding sound and video",
    "FFmpeg",
    "save it anew, for example by ffmpeg",
    ("av", "media", "sound and video need PyAV"),
)


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
