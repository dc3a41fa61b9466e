"""A page of a PDF as an image, drawn by PDFium in a process of its own."""

from __future__ import annotations

import re
from typing import NamedTuple

from PIL import Image

from batchkit.config.tables import MediaTable
from batchkit.errors import MediaError
from batchkit.isolation.files import PDF_READER
from batchkit.rendering.media.pixels import Size, target_of
from batchkit.rendering.media.source import asking

_PAGE = re.compile(  # RFC 8118; a URL may have a query
    r"(.*\.pdf(?:\?[^#]*)?)#page=([1-9][0-9]{0,8})", re.IGNORECASE | re.DOTALL
)
_POINTS_PER_INCH = 72


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
    with asking(PDF_READER, data, name, media) as asked:
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
