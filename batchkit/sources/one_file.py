"""Each file is a row: an image, a text, or anything else that a template names by its path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from batchkit.config.tables import InputTable
from batchkit.config.tables.input import IMAGE_SUFFIXES
from batchkit.sources.files import name_of
from batchkit.sources.reader import Format, Found, Skip


def read(path: str, table: InputTable, skip: Skip, index: int) -> Iterator[Found]:
    """See ``Reader``; the file is not opened."""
    yield None if skip(index) else fields_of(path, table)


def count(path: str) -> int:
    return 1


def fields_of(path: str, table: InputTable) -> dict[str, Any]:
    name = PurePosixPath(name_of(path))
    return {
        "path": table.name_of_file(path),
        "name": name.name,
        "stem": name.stem,
        "suffix": name.suffix,
    }


FORMAT = Format(read, IMAGE_SUFFIXES, count, id="path")
