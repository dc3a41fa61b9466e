"""CSV and TSV: a header, then rows with one cell per column. Every value is text."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator

from batchkit.config.tables import InputTable
from batchkit.errors import InputError
from batchkit.sources.files import BLOCK_BYTES, open_input
from batchkit.sources.formats import suffix_of
from batchkit.sources.reader import Format, Found, Skip, fault, shown

MAX_CELL_CHARS = 2**26
"""A longer cell is refused: it comes from a quote that was never closed, not from real data."""


def read(path: str, table: InputTable, skip: Skip, index: int) -> Iterator[Found]:
    """See ``Reader``; blank lines are skipped, and quoting is checked strictly.

    A fault within one line fails its row. A fault over several lines stops the reading: a quote
    was not closed, and it is unknown how many rows it has swallowed, or how many lines are its own.
    """
    # The limit belongs to the csv module, not to a reader; it is only ever raised.
    csv.field_size_limit(max(csv.field_size_limit(), MAX_CELL_CHARS))
    delimiter = "\t" if suffix_of(path) == ".tsv" else ","
    with open_input(path) as file:
        # Bytes that aren't UTF-8 become lone surrogates, so that they fail one row, not the file.
        text = io.TextIOWrapper(
            file, "utf-8", errors="surrogateescape", newline=_line_end(file.peek(BLOCK_BYTES))
        )
        rows = csv.reader(text, delimiter=delimiter, strict=True)
        header = _header(path, rows)
        while True:
            start = rows.line_num + 1
            try:
                cells = next(rows, None)
            except csv.Error as error:
                if str(error).startswith("new-line character"):
                    raise InputError(
                        f"{path} line {rows.line_num}: a carriage return (\\r) in a cell without quotes, so it is"
                        " unknown where its row ends; quote the cell"
                    ) from error
                if rows.line_num > start:
                    raise InputError(
                        f"{path} lines {start}-{rows.line_num}: {error}; a quote that line {start}"
                        " opens is not closed where its cell ends"
                    ) from error
                problem = f"{error}; check its quotes"
                yield None if skip(index) else fault(path, start, problem)
                index += 1
                continue
            if cells is None:
                return
            if not cells:
                continue
            if skip(index):
                yield None
            elif len(cells) == len(header) and _is_text("".join(cells)):
                yield dict(zip(header, cells, strict=True))
            else:
                yield fault(path, _lines(start, rows.line_num), _problem(cells, header))
            index += 1


def _line_end(start: bytes) -> str:
    """Empty for the ends of lines that csv knows, as old Macs wrote \\r. Where they are \\n, a lone \\r is
    within a text that lacks its quotes (pandas writes such), and cutting it off there would go unseen."""
    return "" if b"\r" in start.partition(b"\n")[0].rstrip(b"\r") else "\n"


def _header(path: str, rows: Iterator[list[str]]) -> list[str]:
    try:
        header = next((cells for cells in rows if cells), None)
    except csv.Error as error:
        raise InputError(f"{path} line 1: the header can't be read: {error}") from error
    if header is None:
        raise InputError(f"{path}: holds only blank lines; line 1 must name the columns")
    if header[0].lstrip().startswith(("{", "[")):
        raise InputError(
            f"{path} line 1: expected column names, found {shown(header[0])}; if this is JSON,"
            ' set input.format to "json" or "jsonl"'
        )
    if not all(_is_text(name) for name in header):
        raise InputError(f"{path} line 1: the header is not UTF-8; save the file as UTF-8")
    if "" in (names := [name.strip() for name in header]):
        raise InputError(
            f"{path} line 1: column {names.index('') + 1} of {len(names)} has no name; name it"
            " (pandas: to_csv(index=False))"
        )
    twice = [name for name, n_columns in Counter(header).items() if n_columns > 1]
    if twice:
        raise InputError(f"{path} line 1: two columns are named {shown(twice[0])}; rename one")
    return header


def _problem(cells: list[str], header: list[str]) -> str:
    if len(cells) != len(header):
        return (
            f"{len(cells)} cells for {len(header)} columns: {shown(cells)};"
            " quote a cell that holds the separator"
        )
    column = next(name for name, cell in zip(header, cells, strict=True) if not _is_text(cell))
    return f"not UTF-8 in column {shown(column)}; save the file as UTF-8"


def _is_text(cell: str) -> bool:
    if cell.isascii():
        return True
    try:
        cell.encode()
    except UnicodeEncodeError:
        return False
    return True


def _lines(first: int, last: int) -> int | str:
    return first if first == last else f"{first}-{last}"


FORMAT = Format(read, (".csv", ".tsv"), is_table=True)
