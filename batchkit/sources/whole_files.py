"""Files that are rows: each image or clip is a row, and so is each page of a PDF.

PDFs are opened in a separate process (``isolation.pdf_child``).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from tempfile import TemporaryFile
from typing import Any

from batchkit.config.tables import InputTable
from batchkit.config.tables.input import CLIP_SUFFIXES, IMAGE_SUFFIXES, PDF_SUFFIX
from batchkit.errors import InputError, MediaError
from batchkit.isolation.files import PDF_READER, FileProcessError, UnreadableFileError, place_of
from batchkit.sources.files import BLOCK_BYTES, COMPRESSIONS, name_of, open_input
from batchkit.sources.reader import Broken, Format, Found, Skip

_MEMORY_BYTES = 2**31


def _read_file(path: str, table: InputTable, skip: Skip, index: int) -> Iterator[Found]:
    """Yield the row of an image or clip (see ``Reader``) without opening the file."""
    yield None if skip(index) else _fields(path, table)


def _fields(path: str, table: InputTable) -> dict[str, Any]:
    name = PurePosixPath(name_of(path))
    return {
        "path": table.name_of_file(path),
        "name": name.name,
        "stem": name.stem,
        "suffix": name.suffix,
    }


def _read_pdf(path: str, table: InputTable, skip: Skip, index: int) -> Iterator[Found]:
    """Yield the pages of a PDF (see ``Reader``). A PDF that can't be opened is one failed row.

    ``page_text`` is empty for a scanned page.
    """
    file = _fields(path, table)
    with _opened(path) as place:
        try:
            n_pages = _n_pages(place, path)
        except MediaError as error:
            yield None if skip(index) else Broken({**file, "image": file["path"]}, error)
            return
        for page in range(1, n_pages + 1):
            yield None if skip(index) else _page(file, place, page, n_pages)
            index += 1


def _n_pages(place: str, path: str) -> int:
    """Return the number of pages.

    An error that the file itself did not cause must stop the run. Otherwise, all later rows would get other indexes.

    Raises:
        MediaError: the file is broken.
        InputError: the pages can't be counted for another reason.
    """
    try:
        return int(PDF_READER.ask(place, _MEMORY_BYTES, "pages"))
    except UnreadableFileError as error:
        raise MediaError(f"{path}: {error}") from None
    except FileProcessError as error:
        raise InputError(f"{path}: its pages can't be counted: {error}") from error


def _page(file: dict[str, Any], place: str, page: int, n_pages: int) -> Found:
    image = f"{file['path']}#page={page}"
    fields = {**file, "image": image, "page": page, "pages": n_pages}
    try:
        return fields | {"page_text": PDF_READER.ask(place, _MEMORY_BYTES, "text", page)}
    except (UnreadableFileError, FileProcessError) as error:
        return Broken(fields, MediaError(f"{image}: its text can't be read: {error}"))


@contextmanager
def _opened(path: str) -> Iterator[str]:
    """Yield a path at which the PDF's process can open the file. A remote or compressed file is copied for this."""
    if (missing := PDF_READER.missing) is not None:
        raise InputError(f"{path}: {missing}")
    with open_input(path, text=False, may_be_empty=True) as file, TemporaryFile() as copy:
        if "://" not in path and not path.endswith(COMPRESSIONS):
            yield place_of(file.fileno())
            return
        shutil.copyfileobj(file, copy, BLOCK_BYTES)
        copy.flush()
        yield place_of(copy.fileno())


FILES = Format(_read_file, IMAGE_SUFFIXES, id="path")
CLIPS = Format(_read_file, CLIP_SUFFIXES, id="path")
PDF = Format(_read_pdf, (PDF_SUFFIX,), id="image")
