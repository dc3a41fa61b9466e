"""Asks the process that opens PDFs (``pdf_child``): a broken one may crash PDFium, or take for ever."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from batchkit.config.installation import how_to_install
from batchkit.isolation.files import Reader, ask_about

MEMORY_BYTES = 2**31
_READER = Reader(
    handler="batchkit.isolation.pdf_child",
    task="reading PDFs",
    library="PDFium",
    remedy="save it anew, for example by printing it to a PDF",
    timeout_s=60.0,
)


def missing_package() -> str | None:
    """What to install, if PDFs can't be read here."""
    if find_spec("pypdfium2") is not None:
        return None
    return f"a PDF needs pypdfium2: {how_to_install('pdf')}"


def ask(what: str, place: str, *arguments: int, memory_bytes: int = MEMORY_BYTES) -> Any:
    """The answer of ``pdf_child`` about the PDF at ``place``, for which it has ``memory_bytes``.

    Raises as ``ask_about``.
    """
    return ask_about(_READER, (what, place, arguments, memory_bytes), memory_bytes)
