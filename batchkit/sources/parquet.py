"""Parquet files, read one small batch at a time. Values of type bytes are not decoded to text."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchkit.config.tables import InputTable
from batchkit.errors import InputError, RequestError
from batchkit.sources.files import BLOCK_BYTES, open_input
from batchkit.sources.reader import Format, Found, Skip, check_columns, shown

MAX_BATCH_ROWS = (
    128  # some values may be far larger than average, if their column is dictionary-encoded
)
TARGET_BATCH_BYTES = 2**24  # size of a batch of average rows
_REMOTE_BLOCK_BYTES = 2**22  # of one request to a store
VALUE_BYTES = 32  # about the size of the smallest Python value
_NOT_PYTHON = (ValueError, OverflowError, pa.ArrowException)
"""What to_pylist raises for a value that Python can't hold: not UTF-8, a date past year 9999."""


def read(path: str, table: InputTable, skip: Skip, index: int) -> Iterator[Found]:
    """Yield the rows of a Parquet file (see ``Reader``). A row group whose rows are all skipped is not read."""
    first = index
    with open_input(path, text=False, in_order=False) as file:
        parquet = _open(path, file)
        try:
            for group in range(parquet.num_row_groups):
                metadata = parquet.metadata.row_group(group)
                end = index + metadata.num_rows
                if all(map(skip, range(index, end))):
                    yield from repeat(None, metadata.num_rows)
                    index = end
                    continue
                for batch in parquet.iter_batches(_batch_rows(metadata), row_groups=[group]):
                    for found in rows_of(batch, path, index - first):
                        yield None if skip(index) else found
                        index += 1
                if index != end:  # Arrow skips the rows of a page without values, without an error
                    raise InputError(
                        f"{path}: row group {group} has {metadata.num_rows:,} rows, but Arrow read only"
                        f" {index - end + metadata.num_rows:,}, because it skips pages without values; write the file"
                        " again, with larger pages (data_page_size in pyarrow)"
                    )
        except pa.ArrowException as error:
            problem = f"broken Parquet after row {index - first}: {error}"
            raise InputError(f"{path}: {problem}") from error


def rows_of(batch: Any, place: str, position: int) -> Iterator[Found]:
    """Yield the rows of an Arrow batch or table. ``place`` and ``position``: its source and the number of its first
    row, for errors.

    A row with a value that Python can't represent becomes an error.
    """
    fitting = batch.num_rows * TARGET_BATCH_BYTES // max(1, batch.nbytes)
    at_once = max(1, min(MAX_BATCH_ROWS, fitting))
    for start in range(0, batch.num_rows, at_once):
        part = batch.slice(start, at_once)
        try:
            yield from part.to_pylist()
        except _NOT_PYTHON:
            for number in range(part.num_rows):
                yield _row(part.slice(number, 1), f"{place} row {position + start + number}")


def _row(row: Any, place: str) -> Found:
    fields: dict[str, Any] = {}
    for name in row.schema.names:
        try:
            [fields[name]] = row.column(name).to_pylist()
        except _NOT_PYTHON as error:
            return RequestError(f"{place}, column {shown(name)}: {error}")
    return fields


def _open(path: str, file: object) -> Any:
    """Return the Parquet file. A buffer is used, so that a column chunk is read page by page.

    INT96, in which Spark writes times, is read in microseconds. In nanoseconds, Arrow's default, times before 1677 or
    after 2262 would change.
    """
    block = _REMOTE_BLOCK_BYTES if "://" in path else BLOCK_BYTES
    try:
        parquet = pq.ParquetFile(
            file, buffer_size=block, pre_buffer=False, coerce_int96_timestamp_unit="us"
        )
    except (pa.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"{path}: not a Parquet file: {reason}; check input.format") from error
    check_columns(path, parquet.schema_arrow.names)
    return parquet


def _batch_rows(group: Any) -> int:
    """Return how many rows of a row group to read at a time, from the sizes in the file's footer."""
    n_rows = max(1, group.num_rows)
    chunks = map(group.column, range(group.num_columns))
    n_bytes = sum(
        max(chunk.total_uncompressed_size, chunk.num_values * VALUE_BYTES) for chunk in chunks
    )
    return max(1, min(MAX_BATCH_ROWS, int(TARGET_BATCH_BYTES * n_rows / max(1, n_bytes))))


FORMAT = Format(read, (".parquet",), is_table=True)
