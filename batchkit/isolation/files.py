"""Readers of PDFs, sound and video in a child process.

Such a file may crash the library that reads it, or make it run forever.
"""

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
    """An error in the file itself, so another attempt is useless."""


class MemoryLimitError(UnreadableFileError):
    """An error of a file that needs more memory to read than the reader may use."""


class FileProcessError(Exception):
    """An error of the child process, which did not answer. Another attempt may succeed."""


class FileReader(NamedTuple):
    """A reader of one kind of file.

    - ``handler``: the module that reads the file in the child process.
    - ``task``, ``library``, ``remedy``: texts for messages about broken files.
    - ``package``: the package that the reader needs: its import name, batchkit's pip extra, and the reason.
    """

    handler: str
    task: str
    library: str
    remedy: str
    package: tuple[str, str, str]
    timeout_s: float = 60.0

    @property
    def missing(self) -> str | None:
        """A message that names the package to install, if such files can't be read on this machine; otherwise None."""
        module, extra, need = self.package
        return None if find_spec(module) is not None else f"{need}: {how_to_install(extra)}"

    def ask(
        self, place: str, memory_bytes: int, what: str, *arguments: Any, seconds: float = 0
    ) -> Any:
        """Call a function of the handler for the file at ``place``, and return its result.

        - ``what``: the function's name, such as "pages". ``arguments``: its arguments.
        - ``memory_bytes``: memory that the handler may use.
        - ``seconds``: added to the reader's usual time limit.

        Raises:
            UnreadableFileError: The file is broken, refused, or needs a password.
            FileProcessError: The handler took too long, or its process was killed.
            EngineError: No process could be started.
        """
        question, limit_s = (what, place, arguments, memory_bytes), self.timeout_s + seconds
        try:
            kind, found = client.ask(self.handler, self.task, marshal.dumps(question), limit_s)
        except TimeoutError:
            raise FileProcessError(
                f"reading the file took longer than {limit_s:g} s; save it again"
            ) from None
        except client.Gone as gone:
            code = gone.returncode
            if code == _KILLED or code is None or code >= 0:
                raise FileProcessError(
                    "the process that reads the file was killed twice; the machine may be short of memory"
                ) from None
            raise UnreadableFileError(
                f"{self.library} crashed while reading the file ({signal.Signals(-code).name}): the file is broken, or"
                f" reading it needs more than {memory_bytes:,} bytes of memory; {self.remedy}"
            ) from None
        match kind:
            case "value":
                return found
            case "memory":
                raise MemoryLimitError(
                    f"reading the file needs more than {memory_bytes:,} bytes of memory"
                )
            case "error":  # libraries do not document what they raise for broken files
                raise UnreadableFileError(f"is broken ({found}); save it again")
        raise UnreadableFileError(found)


PDF_READER = FileReader(
    "batchkit.isolation.pdf_child",
    "reading PDFs",
    "PDFium",
    "save it again, for example by printing it to a PDF",
    ("pypdfium2", "pdf", "a PDF needs pypdfium2"),
)
CLIP_READER = FileReader(
    "batchkit.isolation.clip_child",
    "decoding sound and video",
    "FFmpeg",
    "save it again, for example with ffmpeg",
    ("av", "media", "sound and video need PyAV"),
)


@contextmanager
def placed(data: bytes) -> Iterator[str]:
    """Yield a path at which another process of this user can open ``data`` as a file."""
    descriptor = os.memfd_create("file")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
        yield place_of(descriptor)
    finally:
        os.close(descriptor)


def place_of(descriptor: int) -> str:
    """Return a path at which another process of this user can open the file that ``descriptor`` refers to."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"
