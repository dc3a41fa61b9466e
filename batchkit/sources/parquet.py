"""Parquet, a batch and its pages at a time; bytes stay bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchkit.config import InputTable
from batchkit.errors import InputError, RequestError
from batchkit.sources.files import BLOCK_BYTES, open_input
from batchkit.sources.reader import Found, Skip, shown

MAX_BATCH_ROWS = 1024
TARGET_BATCH_BYTES = 2**24
NOT_PYTHON = (ValueError, OverflowError, pa.ArrowException)
"""What to_pylist raises on a value that Python can't hold: no UTF-8, a date past year 9999."""


def read(path: str, table: InputTable, skip: Skip, index: int) -> Iterator[Found]:
    """See ``Reader``; row groups of which every row is skipped are not read from the file."""
    first = index
    with open_input(path, text=False) as file:
        parquet = _open(path, file)
        try:
            for group in range(parquet.num_row_groups):
                metadata = parquet.metadata.row_group(group)
                if all(map(skip, range(index, index + metadata.num_rows))):
                    yield from repeat(None, metadata.num_rows)
                    index += metadata.num_rows
                    continue
                for batch in parquet.iter_batches(_batch_rows(metadata), row_groups=[group]):
                    for found in _rows(batch, path, index - first):
                        yield None if skip(index) else found
                        index += 1
        except pa.ArrowException as error:
            problem = f"broken Parquet after row {index - first}: {error}"
            raise InputError(f"{path}: {problem}") from error


def count(path: str) -> int:
    """Rows, from the file's footer.

    Raises:
        InputError: not a Parquet file.
    """
    with open_input(path, text=False) as file:
        return int(_open(path, file).metadata.num_rows)


def _open(path: str, file: object) -> Any:
    try:
        # Buffered, a column chunk is read as a stream, page by page, and not all at once.
        parquet = pq.ParquetFile(file, buffer_size=BLOCK_BYTES, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"{path}: not a Parquet file: {reason}; check input.format") from error
    names = Counter(parquet.schema_arrow.names)
    if twice := [name for name, n_columns in names.items() if n_columns > 1]:
        raise InputError(f"{path}: two columns are named {shown(twice[0])}; rename one")
    return parquet


def _batch_rows(metadata: Any) -> int:
    row_bytes = metadata.total_byte_size // max(1, metadata.num_rows)
    return int(max(1, min(MAX_BATCH_ROWS, TARGET_BATCH_BYTES // max(1, row_bytes))))


def _rows(batch: Any, path: str, position: int) -> list[Found]:
    try:
        return list(batch.to_pylist())
    except NOT_PYTHON:
        return [_row(batch.slice(i, 1), path, position + i) for i in range(batch.num_rows)]


def _row(batch: Any, path: str, position: int) -> Found:
    fields: dict[str, Any] = {}
    for name in batch.schema.names:
        try:
            [fields[name]] = batch.column(name).to_pylist()
        except NOT_PYTHON as error:
            return RequestError(f"{path} row {position}, column {shown(name)}: {error}")
    return fields
