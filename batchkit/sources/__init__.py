"""The rows of the input: numbered, filtered, and cut at the limit.

A format is one module with one generator (``reader.Reader``); it does not handle ids, ``where``
and ``limit``, which are handled here for all formats. CONTRIBUTING.md says how to add one.
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
    """A ``skip`` that skips no row."""
    return False


def read_rows(
    table: InputTable,
    *,
    skip: Skip = never,
    files: Mapping[str, str] | None = None,
) -> Iterator[Row]:
    """Rows of the input, lazily: filtered by ``where``, cut at ``limit``, then those of ``shard``, each of them
    once for each value of ``cross``.

    ``files`` are what ``fingerprint`` found earlier, with the hash of each: files that match only
    now are not read. A row that is a file, or a page of one, has that hash in its field ``sha256``,
    so that a file that changes is another row.

    ``Row.index`` is the position in the unfiltered input, over all files in order, and all values. A row that can't
    be read has ``error`` set; it passes every filter, so that it becomes a failed record.

    Rows for which ``skip(index)`` is true are not yielded, but count toward the limit. They are
    skipped without parsing if the format allows it, except if both ``where`` and ``limit`` are set,
    since the limit counts rows that the filter kept. ``skip`` may be called twice for one row, and
    must return the same value.

    The iterator may be shared between threads that hold one lock around ``next``.

    Raises:
        InputError: the input can't be read any further; the rows before it were yielded.
    """
    files = dict.fromkeys(input_files(table), "") if files is None else files
    yield from crossed(table.cross, lambda skip: _of_shard(table, skip, files), skip)


def _of_shard(table: InputTable, skip: Skip, files: Mapping[str, str]) -> Iterator[Row]:
    """As ``read_rows``, without ``cross``."""
    if table.shard is None:
        yield from _rows(table, skip, files)
        return
    shard = parse_shard(table.shard)
    if has_ids(table, files):
        for row in _rows(table, skip, files):
            if shard.holds(str(row.index) if is_fallback(row.id) else row.id):
                yield row
    else:  # depends on the index alone, so the rows of other shards need not be parsed
        yield from _rows(table, lambda index: skip(index) or not shard.holds(str(index)), files)


def _rows(table: InputTable, skip: Skip, files: Mapping[str, str]) -> Iterator[Row]:
    """As ``read_rows``, of all shards."""
    keeps = compile_where(table.where, table.filled)
    filtered = bool(table.where or table.filled)
    checked = not filtered  # the first readable row has shown that the fields in `where` exist

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
    """How many rows ``read_rows`` would yield; parses rows only if ``where`` or ``shard`` is
    set.

    Raises:
        InputError: as ``read_rows``, as far as errors show without parsing.
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
    """True if the rows have ids of their own, which do not depend on their position."""
    return any(_id_key(path, table) is not None for path in files)


def _id_key(path: str, table: InputTable) -> str | None:
    return table.id or load_format(format_of(path, table)).id


def crossed(
    cross: Mapping[str, Sequence[Any]], read: Callable[[Skip], Iterator[Row]], skip: Skip
) -> Iterator[Row]:
    """The rows that ``read`` yields, each once for each variant, but those for which ``skip(index)`` is true: the n of
    the row at position i are the rows i × n to i × n + n - 1, so that ``Row.index`` only depends on the input and on ``cross``.

    A row that has a column of one of the names has ``error`` set.
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
            f"input.cross.{taken[0]}: the row has a column of that name; give the key another one"
        )
    fields = {**row.fields, **variant.fields}
    return replace(row, index=index, id=f"{row.id}/{variant.label}", fields=fields, error=error)
