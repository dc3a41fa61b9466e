"""CSV and TSV files: a header, then rows with one cell per column. Every value is text."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from batchkit.config.tables import InputTable
from batchkit.errors import InputError
from batchkit.sources.files import open_input
from batchkit.sources.formats import suffix_of
from batchkit.sources.reader import Format, Found, Skip, check_columns, fault, shown
from batchkit.storage.plain_json import valid

_HEADER_BYTES = 1 << 16
MAX_CELL_CHARS = 2**26
"""A longer cell is refused: it comes from a quote that was never closed, not from real data."""


def read(path: str, table: InputTable, skip: Skip, index: int) -> Iterator[Found]:
    """Yield the rows of a CSV file (see ``Reader``). Blank lines are skipped, and quoting is checked strictly.

    A fault within one line fails its row. A fault that spans several lines, such as an unclosed quote, stops reading,
    because the number of rows in it is unknown.
    """
    # The csv module has one limit for all readers, so the limit is made larger, never smaller.
    csv.field_size_limit(max(csv.field_size_limit(), MAX_CELL_CHARS))
    with open_input(path) as opened:
        file = io.BufferedReader(opened)
        delimiter = table.separator or _separator(path, file.peek(_HEADER_BYTES))
        # Bytes that aren't UTF-8 become lone surrogates, so that they fail one row, not the file.
        # A lone \r does not end a line: pandas writes a text with \r without quotes.
        text = io.TextIOWrapper(file, "utf-8", errors="surrogateescape", newline="\n")
        rows = csv.reader(text, delimiter=delimiter, strict=True)
        header = _header(path, rows)
        while True:
            start = rows.line_num + 1
            try:
                cells = next(rows, None)
            except csv.Error as error:
                if str(error).startswith("new-line character"):
                    raise _has_return(path, rows.line_num) from error
                if rows.line_num > start:
                    raise InputError(
                        f"{path} lines {start}-{rows.line_num}: {error}; the quote that opens in line"
                        f" {start} is not closed at the end of its cell; close the quote"
                    ) from error
                problem = f"{error}; check the quotes in this line"
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


def _separator(path: str, beginning: bytes) -> str:
    """Return the character between columns: a tab in ``.tsv``.

    In other files it is the first of comma, semicolon, tab and ``|`` that the header contains (default: a comma).
    """
    if suffix_of(path) == ".tsv":
        return "\t"
    header = beginning.lstrip().partition(b"\n")[0]
    return next((mark for mark in ",;\t|" if mark.encode() in header), ",")


def _has_return(path: str, number: int) -> InputError:
    return InputError(
        f"{path} line {number}: has a carriage return (\\r) in a cell without quotes, so it is unknown where"
        " the row ends; put the cell in quotes, and end lines with \\n"
    )


def _header(path: str, rows: Iterator[list[str]]) -> list[str]:
    try:
        header = next((cells for cells in rows if cells), None)
    except csv.Error as error:
        if str(error).startswith("new-line character"):
            raise _has_return(path, 1) from error
        raise InputError(f"{path} line 1: the header can't be read: {error}") from error
    if header is None:
        raise InputError(f"{path}: has only blank lines; line 1 must name the columns")
    if header[0].lstrip().startswith(("{", "[")):
        raise InputError(
            f"{path} line 1: expected column names, found {shown(header[0])}; if this is JSON,"
            ' set input.format to "json" or "jsonl"'
        )
    if not all(_is_text(name) for name in header):
        raise InputError(f"{path} line 1: the header is not UTF-8; save the file as UTF-8")
    check_columns(f"{path} line 1", header)
    return header


def _problem(cells: list[str], header: list[str]) -> str:
    if len(cells) != len(header):
        remedy = "put a cell that contains the separator in quotes"
        remedy = remedy if len(cells) > len(header) else "add the missing cells"
        return f"found {len(cells)} cells for {len(header)} columns: {shown(cells)}; {remedy}"
    column = next(name for name, cell in zip(header, cells, strict=True) if not _is_text(cell))
    return f"not UTF-8 in column {shown(column)}; save the file as UTF-8"


def _is_text(cell: str) -> bool:
    return valid(cell) == cell


def _lines(first: int, last: int) -> int | str:
    return first if first == last else f"{first}-{last}"


FORMAT = Format(read, (".csv", ".tsv"), is_table=True)
