"""Asks the process that opens PDFs (``pdf_child``): a broken one may crash PDFium, or take for ever."""

from __future__ import annotations

import marshal
import os
import signal
from importlib.util import find_spec
from typing import Any

from batchkit.config.installation import how_to_install
from batchkit.isolation import client

PAGE_S = 60.0
MEMORY_BYTES = 2**31
_HANDLER = "batchkit.isolation.pdf_child"
_KILLED = -signal.SIGKILL


class UnreadablePdfError(Exception):
    """The PDF's own fault: it will not be readable next time."""


class PdfProcessError(Exception):
    """There was no answer, and another time there may be one."""


def missing_package() -> str | None:
    """What to install, if PDFs can't be read here."""
    if find_spec("pypdfium2") is not None:
        return None
    return f"a PDF needs pypdfium2: {how_to_install('pdf')}"


def ask(what: str, place: str, *arguments: int, memory_bytes: int = MEMORY_BYTES) -> Any:
    """The answer of ``pdf_child`` about the PDF at ``place``, for which it has ``memory_bytes``.

    Raises:
        UnreadablePdfError: it is broken, or needs a password.
        PdfProcessError: it takes longer than PAGE_S, or the process was killed.
        EngineError: no process can be started.
    """
    question = marshal.dumps((what, place, arguments, memory_bytes))
    try:
        kind, found = client.ask(_HANDLER, "reading PDFs", question, PAGE_S)
    except TimeoutError:
        raise PdfProcessError(f"it takes longer than {PAGE_S:g} s; save it anew") from None
    except client.Gone as gone:
        code = gone.returncode
        if code == _KILLED or code is None or code >= 0:
            raise PdfProcessError(
                "the process that reads it was killed twice; is memory short?"
            ) from None
        raise UnreadablePdfError(
            f"PDFium, which reads it, crashed ({signal.Signals(-code).name}): it is broken, or needs"
            f" more memory than {memory_bytes:,} bytes; save it anew, for example by printing it to"
            " a PDF"
        ) from None
    match kind:
        case "value":
            return found
        case "memory":
            raise UnreadablePdfError(f"needs more memory than {memory_bytes:,} bytes")
        case "error":  # what pypdfium2 raises for a broken file is not documented
            raise UnreadablePdfError(f"is broken ({found}); save it anew")
    raise UnreadablePdfError(found)


def place_of(descriptor: int) -> str:
    """A name under which another process of this user can open the file."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"
