"""A page of a PDF as an image, drawn by PDFium in a process of its own."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from PIL import Image

from batchkit.config.tables import MediaTable
from batchkit.errors import MediaError
from batchkit.isolation.files import FileProcessError, UnreadableFileError, placed
from batchkit.isolation.pdf import ask, missing_package
from batchkit.rendering.media.pixels import Size, target_of

_PAGE = re.compile(  # RFC 8118; a URL may have a query
    r"(.*\.pdf(?:\?[^#]*)?)#page=([1-9][0-9]{0,8})", re.IGNORECASE | re.DOTALL
)
_POINTS_PER_INCH = 72
_SPARE_BYTES = 2**30  # for PDFium itself, and what it makes of the pictures


class PageOf(NamedTuple):
    """The path or URL of a file, and the number of a page of it, if one is named."""

    file: str
    page: int | None


def page_of(source: str) -> PageOf:
    """``scans/a.pdf`` and 3 for ``scans/a.pdf#page=3``."""
    match = _PAGE.fullmatch(source)
    return PageOf(source, None) if match is None else PageOf(match[1], int(match[2]))


def is_pdf(data: bytes) -> bool:
    return data.startswith(b"%PDF-")


def page_image(data: bytes, page: int | None, name: str, media: MediaTable) -> Image.Image:
    """The page at ``media.pdf_dpi``, within ``media``'s limits as any image.

    Raises:
        MediaError: the PDF is broken or needs a password, has no such page, or has several and none
            is named; or the page's pictures need more than ``media.max_decode_bytes``.
    """
    if (missing := missing_package()) is not None:
        raise MediaError(f"{name}: {missing}")
    try:
        with placed(data) as place:
            return _drawn(place, page, name, media)
    except UnreadableFileError as error:
        raise MediaError(f"{name}: {error}") from error
    except FileProcessError as error:
        raise MediaError(f"{name}: the page can't be drawn: {error}") from error


def _drawn(place: str, page: int | None, name: str, media: MediaTable) -> Image.Image:
    def asked(what: str, *arguments: int) -> Any:
        memory_bytes = 2 * media.max_decode_bytes + _SPARE_BYTES
        return ask(what, place, *arguments, memory_bytes=memory_bytes)

    if page is None and (n_pages := asked("pages")) > 1:
        raise MediaError(
            f"{name}: is a PDF of {n_pages:,} pages; name one, as in a.pdf#page=1 (with"
            ' input.format = "pdf", each page is a row, and {{ image }} names it)'
        )
    wide, high, need_bytes = asked("size", page or 1)
    if need_bytes > media.max_decode_bytes:
        raise MediaError(
            f"{name}: the pictures of the page need {need_bytes} bytes to decode,"
            f" media.max_decode_bytes is {media.max_decode_bytes}; raise it or store them smaller"
        )
    scale = media.pdf_dpi / _POINTS_PER_INCH
    full = Size(max(1, round(wide * scale)), max(1, round(high * scale)))
    size = target_of(full, name, media)
    return Image.frombytes("RGB", size, asked("image", page or 1, *size))
