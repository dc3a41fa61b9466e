"""The handler that reads PDFs with PDFium: the number of pages, and each page's text, size and image."""

from __future__ import annotations

import marshal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pypdfium2 as pdfium
import pypdfium2.raw as raw

from batchkit.isolation.child import ChildRefusal, answer_all, limit_memory

_BYTES_PER_PIXEL = 4  # of an image in a page, once PDFium has decoded it
_HYPHENS = {2: "-", 0xFFFE: "-"}  # PDFium's characters for a hyphen at the end of a line
_MOST_OPEN = 2
_open: dict[Any, pdfium.PdfDocument] = {}


def main(connection: Connection) -> None:
    answer_all(connection, _answer)


def _answer(question: bytes) -> Any:
    what, place, arguments, memory_bytes = marshal.loads(question)
    limit_memory(memory_bytes)
    try:
        return _ANSWERS[what](_opened_document(place), *arguments)
    except pdfium.PdfiumError as error:
        raise ChildRefusal("unreadable", _reason(error, place)) from error


def _reason(error: pdfium.PdfiumError, place: str) -> str:
    if not Path(place).stat().st_size:
        return "is empty; save it again"
    if error.err_code == raw.FPDF_ERR_PASSWORD:
        return "needs a password; save it without one, for example with qpdf --decrypt"
    if error.err_code == raw.FPDF_ERR_SECURITY:
        return "has an unsupported encryption; save it without a password"
    with open(place, "rb") as file:
        start = file.read(1024)
    if b"%PDF-" not in start:
        return f"is not a PDF: it begins with {start[:16]!r}"
    return f"is broken ({error}); save it again, for example by printing it to a PDF"


def _opened_document(place: str) -> pdfium.PdfDocument:
    """Return the PDF at ``place``. The last two PDFs stay open, because a thread may alternate between the pages of
    two."""
    status = Path(place).stat()
    key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    document = _open.pop(key, None)
    if document is None:
        while len(_open) >= _MOST_OPEN:
            _open.pop(next(iter(_open))).close()
        file = open(place, "rb")  # noqa: SIM115 - the document closes it
        document = pdfium.PdfDocument(file, autoclose=True)
        document.init_forms()  # otherwise filled-in form fields are not drawn
    _open[key] = document  # as the most recent one
    return document


def _page(document: pdfium.PdfDocument, number: int) -> pdfium.PdfPage:
    if number > len(document):
        pages = "1 page" if len(document) == 1 else f"{len(document):,} pages"
        raise ChildRefusal("unreadable", f"has only {pages}, so there is no page {number:,}")
    return document[number - 1]


def _text(document: pdfium.PdfDocument, page: int) -> str:
    text: str = _page(document, page).get_textpage().get_text_bounded()
    return text.replace("\r\n", "\n").translate(_HYPHENS).strip()


def _size(document: pdfium.PdfDocument, page: int) -> tuple[float, float, int]:
    """Return the page's width and height in points, and the size of its decoded images in bytes."""
    found = _page(document, page)
    pictures = (it.get_px_size() for it in found.get_objects(filter=[raw.FPDF_PAGEOBJ_IMAGE]))
    n_bytes = sum(_BYTES_PER_PIXEL * width * height for width, height in pictures)
    return *found.get_size(), n_bytes


def _image(document: pdfium.PdfDocument, page: int, width: int, height: int) -> bytes:
    """Return the page's RGB pixels on a white background."""
    found = _page(document, page)
    bitmap = pdfium.PdfBitmap.new_native(width, height, raw.FPDFBitmap_BGR, rev_byteorder=True)
    bitmap.fill_rect((255, 255, 255, 255), 0, 0, width, height)
    flags = raw.FPDF_ANNOT | raw.FPDF_REVERSE_BYTE_ORDER
    where = (bitmap, found, 0, 0, width, height, 0, flags)
    raw.FPDF_RenderPageBitmap(*where)
    if document.formenv:
        raw.FPDF_FFLDraw(document.formenv, *where)
    return bytes(bitmap.buffer)


_ANSWERS: dict[str, Callable[..., Any]] = {
    "pages": len,
    "text": _text,
    "size": _size,
    "image": _image,
}
