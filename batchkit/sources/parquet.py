"""Parquet, read one batch and its pages at a time; bytes stay bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import repeat
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from batchkit.config.tables import InputTable
from batchkit.errors import InputError, RequestError
from batchkit.sources.decoded import VALUE_BYTES, Slice, slices
from batchkit.sources.files import BLOCK_BYTES, open_input
from batchkit.sources.parquet_page import DictionaryPage, dictionary_page, longest_value
from batchkit.sources.reader import Format, Found, Skip, shown

MAX_BATCH_ROWS = 1024
TARGET_BATCH_BYTES = 2**24
MAX_BATCH_BYTES = 2**26  # if every row has the longest value of its dictionary
MIN_BATCH_ROWS = 32  # smaller batches are slow: Arrow allocates a page's size for each batch
MAX_SHARED_BYTES = 2**26  # a dictionary that is kept is copied for each batch
MAX_ROW_BYTES = 2**30
NOT_PYTHON = (ValueError, OverflowError, pa.ArrowException)
"""What to_pylist raises for a value that Python can't hold: not UTF-8, a date past year 9999."""


def read(path: str, table: InputTable, skip: Skip, index: int) -> Iterator[Found]:
    """See ``Reader``; a row group is not read from the file if all its rows are skipped."""
    first = index
    with open_input(path, text=False) as file:
        parquet = _open(path, file)
        footer, plain = parquet.metadata, parquet.schema_arrow
        try:
            for group in range(parquet.num_row_groups):
                metadata = footer.row_group(group)
                if all(map(skip, range(index, index + metadata.num_rows))):
                    yield from repeat(None, metadata.num_rows)
                    index += metadata.num_rows
                    continue
                end = index + metadata.num_rows
                n_rows, shared = _plan(file, footer, group, plain)
                source = (
                    _parquet(file, metadata=footer, read_dictionary=shared) if shared else parquet
                )
                for batch in source.iter_batches(n_rows, row_groups=[group]):
                    for part in slices(batch, TARGET_BATCH_BYTES):
                        for found in _rows(part, plain, path, index - first):
                            yield None if skip(index) else found
                            index += 1
                        del part
                    del batch  # else it is kept in memory until the next is read
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


def _open(path: str, file: object) -> Any:
    try:
        parquet = _parquet(file)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"{path}: not a Parquet file: {reason}; check input.format") from error
    names = Counter(parquet.schema_arrow.names)
    if twice := [name for name, n_columns in names.items() if n_columns > 1]:
        raise InputError(f"{path}: two columns are named {shown(twice[0])}; rename one")
    return parquet


def _parquet(file: object, **how: Any) -> Any:
    """Buffered, so that a column chunk is read as a stream, page by page, and not all at once.

    INT96, in which Spark writes times, has any year; in Arrow's default, nanoseconds, a time before 1677
    or after 2262 would be another one.
    """
    return pq.ParquetFile(
        file,
        buffer_size=BLOCK_BYTES,
        pre_buffer=False,
        coerce_int96_timestamp_unit="us",
        **how,
    )


class _Plan(NamedTuple):
    """How to read a row group: rows at a time, and the columns that keep their dictionaries."""

    batch_rows: int
    shared: list[str]


class _Dictionary(NamedTuple):
    """A column's dictionary; every value of a batch may be its longest value."""

    chunk: Any
    page: DictionaryPage
    per_row: int
    is_nested: bool


def _plan(file: Any, footer: Any, group: int, plain: Any) -> _Plan:
    """Based on the average row, and on the largest row that the dictionaries allow.

    A delta-encoded value shares a prefix with the one before, and may be as large as its chunk.
    """
    metadata, dictionaries = footer.row_group(group), list[_Dictionary]()
    n_rows = max(1, metadata.num_rows)
    row_bytes = 0
    for number in range(metadata.num_columns):
        chunk, column = metadata.column(number), footer.schema.column(number)
        per_row, size = -(-chunk.num_values // n_rows), chunk.total_uncompressed_size
        width = column.length if chunk.physical_type == "FIXED_LEN_BYTE_ARRAY" else 0
        row_bytes += max(size // n_rows, per_row * max(VALUE_BYTES, width))
        if chunk.physical_type != "BYTE_ARRAY" or size * chunk.num_values <= TARGET_BATCH_BYTES:
            continue
        if "DELTA_BYTE_ARRAY" in chunk.encodings:
            row_bytes += per_row * size
        if page := dictionary_page(file, chunk):
            is_nested = column.max_repetition_level > 0
            dictionaries.append(_Dictionary(chunk, page, per_row, is_nested))
    usual = max(1, min(MAX_BATCH_ROWS, TARGET_BATCH_BYTES // max(1, row_bytes)))
    longest = _longest(file, dictionaries, usual)
    shared = [
        one.chunk.path_in_schema
        for one, n_bytes in zip(dictionaries, longest, strict=True)
        if _is_shared(one, n_bytes, usual, plain)
    ]
    most = sum(
        one.per_row * n_bytes
        for one, n_bytes in zip(dictionaries, longest, strict=True)
        if one.is_nested or one.chunk.path_in_schema not in shared  # a list is cast as a whole
    )
    return _Plan(max(1, min(usual, MAX_BATCH_BYTES // max(1, most))), shared)


def _longest(file: Any, dictionaries: list[_Dictionary], usual: int) -> list[int]:
    """An upper bound for each dictionary's values, in bytes: its whole size if that is enough."""
    most = sum(one.per_row * one.page.decoded_bytes for one in dictionaries)
    will_do = most * min(usual, MIN_BATCH_ROWS) <= MAX_BATCH_BYTES
    return [
        one.page.decoded_bytes
        if will_do and not _is_maybe_one_row(one, one.page.decoded_bytes)
        else longest_value(file, one.page)
        for one in dictionaries
    ]


def _is_shared(one: _Dictionary, longest: int, usual: int, plain: Any) -> bool:
    """Whether it may be too large for one row, or for the rows that would be read at a time."""
    if _is_maybe_one_row(one, longest):
        return True
    path, size = one.chunk.path_in_schema, one.chunk.total_uncompressed_size
    if path not in plain.names or max(size, one.page.decoded_bytes) > MAX_SHARED_BYTES:
        return False
    kind = plain.field(path).type  # Arrow may read other types without their dictionary
    is_text = bool(pa.types.is_string(kind) or pa.types.is_binary(kind))
    return is_text and longest * min(usual, MIN_BATCH_ROWS) > MAX_BATCH_BYTES


def _is_maybe_one_row(one: _Dictionary, longest: int) -> bool:
    return one.is_nested and longest * one.chunk.num_values > MAX_ROW_BYTES


def _rows(part: Slice, plain: Any, path: str, position: int) -> list[Found]:
    batch = part.batch
    if part.n_bytes > MAX_ROW_BYTES:
        problem = f"{part.n_bytes:,} bytes once decoded; the most is {MAX_ROW_BYTES:,}"
        return [RequestError(f"{path} row {position}: takes {problem}")]
    try:
        return list(_decoded(batch, plain).to_pylist())
    except NOT_PYTHON:
        return [
            row_by_column(batch.slice(i, 1), f"{path} row {position + i}")
            for i in range(batch.num_rows)
        ]


def _decoded(batch: Any, plain: Any) -> Any:
    """``batch`` with the types of ``plain``: without dictionaries, which convert slowly."""
    columns = []
    for column, field in zip(batch.columns, plain, strict=True):
        try:
            columns.append(column.cast(field.type))
        except (*NOT_PYTHON, NotImplementedError):
            columns.append(column)
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def row_by_column(table: Any, place: str) -> dict[str, Any] | RequestError:
    """The only row of ``table``; an error at ``place`` if Python can't hold one of its values."""
    fields: dict[str, Any] = {}
    for name in table.schema.names:
        try:
            [fields[name]] = table.column(name).to_pylist()
        except NOT_PYTHON as error:
            return RequestError(f"{place}, column {shown(name)}: {error}")
    return fields


FORMAT = Format(read, (".parquet",), count, is_table=True)
