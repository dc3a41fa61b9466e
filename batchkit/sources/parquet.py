"""Parquet, read one small batch at a time; bytes stay bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchkit.config.tables import InputTable
from batchkit.errors import InputError, RequestError
from batchkit.sources.files import BLOCK_BYTES, open_input
from batchkit.sources.reader import Format, Found, Skip, shown

MAX_BATCH_ROWS = 1024
TARGET_BATCH_BYTES = 2**24  # of average rows
MAX_BATCH_BYTES = 2**27  # if each value is as large as all values of its dictionary
MAX_ROW_BYTES = 2**30
VALUE_BYTES = 32  # about the size of the smallest Python value
_NOT_PYTHON = (ValueError, OverflowError, pa.ArrowException)
"""What to_pylist raises for a value that Python can't hold: not UTF-8, a date past year 9999."""


def read(path: str, table: InputTable, skip: Skip, index: int) -> Iterator[Found]:
    """See ``Reader``; a row group is not read from the file if all its rows are skipped."""
    first = index
    with open_input(path, text=False) as file:
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
                if index != end:  # Arrow reads no row of a page without values, and raises nothing
                    raise InputError(
                        f"{path}: row group {group} has {metadata.num_rows:,} rows, and Arrow read"
                        f" {index - end + metadata.num_rows:,}; write the file again, with larger pages"
                    )
        except pa.ArrowException as error:
            problem = f"broken Parquet after row {index - first}: {error}"
            raise InputError(f"{path}: {problem}") from error


def count(path: str) -> int:
    """The number of rows, from the file's footer.

    Raises:
        InputError: not a Parquet file.
    """
    with open_input(path, text=False) as file:
        return int(_open(path, file).metadata.num_rows)


def rows_of(batch: Any, place: str, position: int) -> Iterator[Found]:
    """The rows of an Arrow batch or table, of which the first is row ``position`` of ``place``. A row
    that Python can't hold is an error, and so is one of more than 1 GiB."""
    fitting = batch.num_rows * TARGET_BATCH_BYTES // max(1, batch.nbytes)
    at_once = max(1, min(MAX_BATCH_ROWS, fitting))
    for start in range(0, batch.num_rows, at_once):
        part = batch.slice(start, at_once)
        try:
            if part.num_rows > 1 or part.nbytes <= MAX_ROW_BYTES:
                yield from part.to_pylist()
                continue
        except _NOT_PYTHON:
            pass
        for number in range(part.num_rows):
            yield _row(part.slice(number, 1), f"{place} row {position + start + number}")


def _row(row: Any, place: str) -> Found:
    if row.nbytes > MAX_ROW_BYTES:
        return RequestError(f"{place}: takes {row.nbytes:,} bytes; the most is {MAX_ROW_BYTES:,}")
    fields: dict[str, Any] = {}
    for name in row.schema.names:
        try:
            [fields[name]] = row.column(name).to_pylist()
        except _NOT_PYTHON as error:
            return RequestError(f"{place}, column {shown(name)}: {error}")
    return fields


def _open(path: str, file: object) -> Any:
    """Buffered, so that a column chunk is read as a stream, page by page, and not all at once.

    INT96, in which Spark writes times, has any year; in Arrow's default, nanoseconds, a time before 1677
    or after 2262 would be another one.
    """
    try:
        parquet = pq.ParquetFile(
            file, buffer_size=BLOCK_BYTES, pre_buffer=False, coerce_int96_timestamp_unit="us"
        )
    except (pa.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"{path}: not a Parquet file: {reason}; check input.format") from error
    names = Counter(parquet.schema_arrow.names)
    if twice := [name for name, n_columns in names.items() if n_columns > 1]:
        raise InputError(f"{path}: two columns are named {shown(twice[0])}; rename one")
    return parquet


def _batch_rows(group: Any) -> int:
    """How many rows of a row group to read at a time, from the sizes that the footer has."""
    n_rows = max(1, group.num_rows)
    average = largest = 0.0
    for number in range(group.num_columns):
        chunk = group.column(number)
        per_row = chunk.num_values / n_rows
        average += max(chunk.total_uncompressed_size / n_rows, per_row * VALUE_BYTES)
        largest += per_row * _dictionary_bytes(chunk)
    most = min(TARGET_BATCH_BYTES / max(1, average), MAX_BATCH_BYTES / max(1, largest))
    return max(1, min(MAX_BATCH_ROWS, int(most)))


def _dictionary_bytes(chunk: Any) -> float:
    """About how many bytes the values of a column chunk's dictionary have, unpacked."""
    if not chunk.has_dictionary_page or "BYTE_ARRAY" not in chunk.physical_type:
        return 0.0
    packed = chunk.data_page_offset - chunk.dictionary_page_offset
    return float(packed * chunk.total_uncompressed_size / max(1, chunk.total_compressed_size))


FORMAT = Format(read, (".parquet",), count, is_table=True)
