"""Excel workbooks: one sheet, whose first row names the columns. Values keep their types."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import IO, Any
from zipfile import ZipFile

from batchkit.config.installation import how_to_install
from batchkit.config.tables import InputTable
from batchkit.errors import InputError, RequestError
from batchkit.sources.files import BLOCK_BYTES, open_input
from batchkit.sources.reader import Format, Found, Skip, one_of, shown

MAX_TEXT_BYTES = (
    2**28
)  # of all cells' different texts, which a workbook stores, and we hold, at once
_TEXTS = "sharedstrings.xml"
# What a program writes that leaves computing to Excel: the values of its formulas are missing, or 0.
_TO_COMPUTE = re.compile(rb'fullCalcOnLoad="(?:1|true)"')
# A cell whose formula has no value. Its attributes say whether that is an empty text, which is one.
_NO_VALUE = re.compile(
    rb"<(?:\w+:)?c((?:\s[^<>]*)?)>\s*<(?:\w+:)?f(?:\s[^<>]*?)?(?:/>|>[^<]*</(?:\w+:)?f>)\s*"
    rb"(?:</(?:\w+:)?c>|(<(?:\w+:)?v(?:\s[^<>]*?)?(?:/>|></)))"
)
# How a workbook writes what XML has no characters for, such as the \r of a line break, and the _ that
# begins a text of that form. Other escapes are left: openpyxl hides whether they were meant.
_ESCAPED = re.compile("_x(00[01][0-9A-Fa-f]|005[Ff])_")
_EXACT = 2**53  # a cell's number is a double, which is exact below this
_LONGEST_CELL = 2**17  # bytes, with a formula, which may have 8,192 characters
_FORMULA = object()  # in place of a value that is not known
_NOT_COMPUTED = (
    "a formula without a value; open the workbook in Excel or LibreOffice and save it there"
)


def read(path: str, table: InputTable, skip: Skip, index: int) -> Iterator[Found]:
    """See ``Reader``; ``input.records`` names the sheet, by default the first one. Blank rows are
    skipped. A formula has the value that Excel has saved with it; without one, it fails its row."""
    with open_input(path, text=False) as file, closing(_opened(path, file)) as workbook:
        rows = _values(_sheet(path, workbook, table.records))
        number = 0
        try:
            header: list[str] | None = None
            for number, cells in enumerate(rows, start=1):
                if all(cell is None for cell in cells):
                    continue
                if header is None:
                    header = _header(path, number, cells)
                    continue
                yield None if skip(index) else _fields(path, number, cells, header)
                index += 1
        except InputError:
            raise
        except Exception as error:  # openpyxl raises what its parsers do: KeyError, ParseError …
            raise InputError(f"{path}: broken workbook after row {number}: {error}") from error
    if header is None:
        raise InputError(f"{path}: its sheet is empty; the first row must name the columns")


def _opened(path: str, file: IO[bytes]) -> Any:
    try:
        from openpyxl import load_workbook
    except ImportError as error:
        raise InputError(
            f"{path}: an Excel workbook needs openpyxl: {how_to_install('excel')}"
        ) from error
    try:
        is_computed = True
        with ZipFile(file) as archive:
            for part in archive.infolist():
                if part.filename.lower().endswith(_TEXTS):
                    _check_size(path, part.file_size)
                elif part.filename.endswith("/workbook.xml"):
                    is_computed &= _TO_COMPUTE.search(archive.read(part)) is None
                elif is_computed and "/worksheets/" in part.filename:
                    with archive.open(part) as sheet:
                        is_computed = _has_all_values(sheet)
        return load_workbook(file, read_only=True, data_only=is_computed, keep_links=False)
    except InputError:
        raise
    except Exception as error:  # openpyxl raises what its parsers do
        raise InputError(
            f"{path}: not an .xlsx workbook: {error}; save it anew as .xlsx, or check input.format"
        ) from error


def _has_all_values(sheet: IO[bytes]) -> bool:
    """False if a formula has no value; then other formulas may have old ones."""
    seen = b""
    while block := sheet.read(BLOCK_BYTES):
        seen = seen[-_LONGEST_CELL:] + block
        if any(not value or b't="str"' not in of for of, value in _NO_VALUE.findall(seen)):
            return False
    return True


def _check_size(path: str, n_bytes: int) -> None:
    if n_bytes > MAX_TEXT_BYTES:
        raise InputError(
            f"{path}: its texts take {n_bytes:,} bytes, and a workbook's must be read at once; the"
            f" most is {MAX_TEXT_BYTES:,}: save it as CSV"
        )


def _sheet(path: str, workbook: Any, name: str | None) -> Any:
    sheets = {sheet.title: sheet for sheet in workbook.worksheets}
    if not sheets:
        raise InputError(f"{path}: has no sheet with cells")
    if name is not None and name not in sheets:
        raise InputError(f"{path}: input.records = {name!r} names no sheet; {one_of(name, sheets)}")
    sheet = sheets[name or next(iter(sheets))]
    if name is None and sheet.sheet_state != "visible":
        raise InputError(
            f"{path}: its first sheet, {shown(sheet.title)}, is hidden; set input.records to the sheet that"
            f" is meant, one of {', '.join(map(shown, sheets))}"
        )
    sheet.reset_dimensions()  # what some programs write there is wrong, and would cut off columns
    return sheet


def _values(sheet: Any) -> Iterator[Sequence[Any]]:
    if sheet.parent.data_only:
        for values in sheet.iter_rows(values_only=True):
            yield [_plain(value) for value in values]
        return
    for cells in sheet.iter_rows():
        yield [_FORMULA if cell.data_type == "f" else _plain(cell.value) for cell in cells]


def _plain(value: Any) -> Any:
    """A text without escapes. A whole number as one: Google Sheets writes 1.0 where Excel writes 1."""
    if isinstance(value, str) and "_x00" in value:
        return _ESCAPED.sub(lambda escape: chr(int(escape[1], 16)), value)
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return int(value)
    return value


def _header(path: str, number: int, cells: Sequence[Any]) -> list[str]:
    if _FORMULA in cells:
        column = cells.index(_FORMULA) + 1
        raise InputError(f"{path} row {number}: column {column} is {_NOT_COMPUTED}")
    names = [str(cell).strip() if cell is not None else "" for cell in cells]
    while not names[-1]:
        names.pop()
    if "" in names:
        column = names.index("") + 1
        raise InputError(
            f"{path} row {number}: column {column} of {len(names)} has no name; the first row must"
            " name the columns"
        )
    twice = [name for name, n_columns in Counter(names).items() if n_columns > 1]
    if twice:
        raise InputError(
            f"{path} row {number}: two columns are named {shown(twice[0])}; rename one"
        )
    return names


def _fields(path: str, number: int, cells: Sequence[Any], header: list[str]) -> Found:
    for name, cell in zip(header, cells, strict=False):
        if cell is _FORMULA:
            return RequestError(f"{path} row {number}, column {shown(name)}: is {_NOT_COMPUTED}")
    extra = [cell for cell in cells[len(header) :] if cell is not None]
    if extra:
        return RequestError(
            f"{path} row {number}: {shown(extra[0])} is in a column without a name; name it in the"
            " first row"
        )
    values = [*cells[: len(header)], *[None] * (len(header) - len(cells))]
    return dict(zip(header, values, strict=True))


FORMAT = Format(read, (".xlsx", ".xlsm"), is_table=True)
