"""Reading of the input's rows: ids, filter, limit and shard for all formats.

Each format is one module with one generator (``reader.Reader``). CONTRIBUTING.md explains how to add a format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from msgspec.structs import replace

from batchkit.config.masking import masked
from batchkit.config.shard import parse_shard
from batchkit.config.tables import InputTable
from batchkit.config.tables.input import Variant, variants
from batchkit.errors import RequestError
from batchkit.sources.finding import input_files
from batchkit.sources.fingerprint import content_hash
from batchkit.sources.formats import ROWS_ARE_FILES, format_of, load_format
from batchkit.sources.reader import Broken, Skip, is_fallback, row_of
from batchkit.sources.where import check_fields, compile_where
from batchkit.types import Row


def never(index: int) -> bool:
    """Return False. As the argument ``skip`` of a reader, this function skips no row."""
    return False


def read_rows(
    table: InputTable,
    *,
    skip: Skip = never,
    files: Mapping[str, str] | None = None,
) -> Iterator[Row]:
    """Yield the rows of the input lazily: filtered by ``where``, limited, of one ``shard``, and multiplied by
    ``cross``.

    ``Row.index`` is the position in the unfiltered input, over all files and ``cross`` values. A row that can't be read
    has ``error`` set. It passes every filter, so that it becomes a failed record. Threads may share the iterator if
    they hold one lock around ``next``.

    - ``files``: hashes by path of the files that an earlier ``fingerprint`` found; other files are not read. A row that
      is a file, or a page of one, gets the hash in its field ``sha256``, so the row counts as another row if the file
      changes.
    - ``skip``: returns True for the index of a row that should not be yielded; such rows count toward the limit. They
      are not parsed if the format allows that, unless both ``where`` and ``limit`` are set, because the limit counts
      rows that the filter kept. ``skip`` may be called twice for a row, and must return the same value both times.

    Raises:
        InputError: The rest of the input can't be read; the rows before it were yielded.
    """
    files = dict.fromkeys(input_files(table), "") if files is None else files
    yield from crossed(table.cross, lambda skip: _of_shard(table, skip, files), skip)


def _of_shard(table: InputTable, skip: Skip, files: Mapping[str, str]) -> Iterator[Row]:
    """Yield the rows of ``table.shard`` (all rows if it is not set), not yet multiplied by ``cross``.

    ``skip`` and ``files``: as in ``read_rows``.
    """
    if table.shard is None:
        yield from _rows(table, skip, files)
        return
    shard = parse_shard(table.shard)
    if has_ids(table, files):
        for row in _rows(table, skip, files):
            if shard.holds(str(row.index) if is_fallback(row.id) else row.id):
                yield row
    else:  # the shard depends only on the index, so rows of other shards need not be parsed
        yield from _rows(table, lambda index: skip(index) or not shard.holds(str(index)), files)


def _rows(table: InputTable, skip: Skip, files: Mapping[str, str]) -> Iterator[Row]:
    """Yield the rows of all shards, filtered and limited, not yet multiplied by ``cross``.

    ``skip`` and ``files``: as in ``read_rows``.
    """
    keeps = compile_where(table.where, table.filled)
    filtered = bool(table.where or table.filled)
    checked = not filtered  # True once a readable row has shown that the fields in `where` exist

    def passes_over(index: int) -> bool:
        return checked and table.limit is None and skip(index)

    index = n_kept = 0
    some_have_ids = has_ids(table, files)
    for path, sha256 in files.items():
        format_name = format_of(path, table)
        key = _id_key(path, table)
        format_ = load_format(format_name)
        is_file = format_name in ROWS_ARE_FILES
        is_signed = is_file and "://" in path and masked(path) != path
        must_check = filtered and (not checked or format_.is_table)
        for found in format_.read(path, table, passes_over if filtered else skip, index):
            if is_file and isinstance(found, dict | Broken):
                sha256 = sha256 or content_hash(path)
                (found.fields if isinstance(found, Broken) else found)["sha256"] = sha256
            if must_check and isinstance(found, dict):
                check_fields(table.where, found, path)
                must_check, checked = False, True
            if not filtered or not isinstance(found, dict) or keeps(found):
                n_kept += 1
                if found is not None and not (filtered and skip(index)):
                    row = row_of(index, found, key, path, others_have_ids=some_have_ids)
                    yield replace(row, id=masked(row.id)) if is_signed else row
            index += 1
            if n_kept == table.limit:
                return


def count_rows(table: InputTable, files: Mapping[str, str] | None = None) -> int:
    """Return the number of rows that ``read_rows`` would yield. Rows are parsed only if a filter or ``shard`` is set.

    Raises:
        InputError: as ``read_rows``, for errors that are found without parsing the rows.
    """
    if table.is_filtered:
        return sum(1 for _ in read_rows(table, files=files))
    total = 0
    for path in input_files(table) if files is None else files:
        rest = None if table.limit is None else table.limit - total
        rows = load_format(format_of(path, table)).read(path, table, lambda index: True, 0)
        total += sum(1 for _ in islice(rows, rest))
        if total == table.limit:
            break
    return total * len(variants(table.cross))


def has_ids(table: InputTable, files: Iterable[str]) -> bool:
    """Return True if the rows have ids that do not depend on their position."""
    return any(_id_key(path, table) is not None for path in files)


def _id_key(path: str, table: InputTable) -> str | None:
    return table.id or load_format(format_of(path, table)).id


def crossed(
    cross: Mapping[str, Sequence[Any]], read: Callable[[Skip], Iterator[Row]], skip: Skip
) -> Iterator[Row]:
    """Yield each row once for each combination of the values in ``cross``, except rows for which ``skip(index)`` is
    true.

    The n variants of the row at position i have the indexes i × n to i × n + n - 1. So ``Row.index`` depends only on
    the input and on ``cross``. A row that already has a column with the name of a key in ``cross`` gets ``error`` set.

    ``read(skip)``: yields the rows of the input for whose index ``skip(index)`` is false.
    """
    if not cross:
        yield from read(skip)
        return
    found = variants(cross)
    n = len(found)
    for row in read(lambda index: all(map(skip, range(index * n, index * n + n)))):
        for index, variant in enumerate(found, start=row.index * n):
            if not skip(index):
                yield _of_variant(row, index, variant)


def _of_variant(row: Row, index: int, variant: Variant) -> Row:
    error = row.error
    if error is None and (taken := [name for name in variant.fields if name in row.fields]):
        error = RequestError(
            f"input.cross.{taken[0]}: the row already has a column of that name; rename the key"
        )
    fields = {**row.fields, **variant.fields}
    return replace(row, index=index, id=f"{row.id}/{variant.label}", fields=fields, error=error)
