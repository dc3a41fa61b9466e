"""Excel workbooks: one sheet, with column names in the first row. Values keep their types."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from typing import IO, Any
from zipfile import BadZipFile, ZipFile

from batchkit.config.installation import how_to_install
from batchkit.config.tables import InputTable
from batchkit.errors import InputError, RequestError
from batchkit.sources.files import open_input
from batchkit.sources.reader import Format, Found, Skip, check_columns, one_of, shown

# Programs that let Excel compute the formulas write this. The saved values of formulas are then missing or 0.
_TO_COMPUTE = re.compile(rb'fullCalcOnLoad="(?:1|true)"')
# A workbook's escape for characters that XML lacks, such as the \r of a line break, and for the _ of a
# literal text in that form. Other escapes are not resolved, because openpyxl does not tell them from literal text.
_ESCAPED = re.compile("_x(00[01][0-9A-Fa-f]|005[Ff])_")
_EXACT = 2**53  # numbers in cells are doubles, which are exact below this
_FORMULA = object()  # stands for an unknown value
_NOT_COMPUTED = (
    "a formula without a value; open the workbook in Excel or LibreOffice and save it there"
)


def read(path: str, table: InputTable, skip: Skip, index: int) -> Iterator[Found]:
    """Yield the rows of the sheet that ``input.records`` names, by default the first (see ``Reader``).

    Blank rows are skipped. The value of a formula is its saved value. If there is none, the row fails.
    """
    with open_input(path, text=False) as file, ExitStack() as stack:
        is_computed = _is_computed(path, file)
        books = [_opened(path, file, data_only=only) for only in (True, False)]
        sheets = [_sheet(path, stack.enter_context(closing(book)), table.records) for book in books]
        number = 0
        try:
            header, header_row = list[str](), 0
            for number, cells in enumerate(_values(*sheets, is_computed=is_computed), start=1):
                if all(cell is None for cell in cells):
                    continue
                if not header:
                    header, header_row = _header(path, number, cells), number
                    continue
                if number == header_row + 1:
                    _check_header(path, header, number, cells)
                yield None if skip(index) else _fields(path, number, cells, header)
                index += 1
        except InputError:
            raise
        except Exception as error:  # openpyxl passes on its parsers' errors: KeyError, ParseError …
            raise InputError(
                f"{path}: broken workbook after row {number}: {error}; open it in Excel and save it again"
            ) from error
    if not header:
        names = ", ".join(shown(name) for name in books[0].sheetnames)
        raise InputError(
            f"{path}: the sheet is empty; its first row must name the columns. input.records selects the sheet, one of:"
            f" {names}"
        )


def _is_computed(path: str, file: IO[bytes]) -> bool:
    """Return whether the saved values of formulas are current. Some programs let Excel compute them when it opens the
    file."""
    try:
        with ZipFile(file) as archive:
            return _TO_COMPUTE.search(archive.read("xl/workbook.xml")) is None
    except (BadZipFile, KeyError) as error:
        raise _is_no_workbook(path, error) from error


def _opened(path: str, file: IO[bytes], *, data_only: bool) -> Any:
    try:
        from openpyxl import load_workbook
    except ImportError as error:
        raise InputError(
            f"{path}: an Excel workbook needs openpyxl: {how_to_install('excel')}"
        ) from error
    try:
        return load_workbook(file, read_only=True, data_only=data_only, keep_links=False)
    except Exception as error:  # openpyxl passes on its parsers' errors
        raise _is_no_workbook(path, error) from error


def _is_no_workbook(path: str, error: Exception) -> InputError:
    return InputError(
        f"{path}: not an .xlsx workbook: {error}; save it again as .xlsx, or check input.format"
    )


def _sheet(path: str, workbook: Any, name: str | None) -> Any:
    sheets = {sheet.title: sheet for sheet in workbook.worksheets}
    if not sheets:
        raise InputError(
            f"{path}: the workbook has no worksheet, only other sheets such as charts; put the rows into a worksheet"
        )
    if name is not None and name not in sheets:
        raise InputError(
            f"{path}: input.records: there is no sheet {name!r}; {one_of(name, sheets)}"
        )
    sheet = sheets[name or next(iter(sheets))]
    if name is None and sheet.sheet_state != "visible":
        raise InputError(
            f"{path}: its first sheet, {shown(sheet.title)}, is hidden; set input.records to one of"
            f" {', '.join(map(shown, sheets))}"
        )
    sheet.reset_dimensions()  # some programs write wrong dimensions, which would cut off columns
    return sheet


def _values(saved: Any, written: Any, *, is_computed: bool) -> Iterator[Sequence[Any]]:
    """Yield rows of values from the sheet ``saved``. ``written``: the same sheet with formulas instead of saved
    values."""
    for cells, formulas in zip(saved.iter_rows(), written.iter_rows(), strict=True):
        yield [
            _plain(cell.value)
            if of.data_type != "f" or (is_computed and _has_value(cell))
            else _FORMULA
            for cell, of in zip(cells, formulas, strict=True)
        ]


def _has_value(cell: Any) -> bool:
    """Return whether the cell of a formula has a saved value. openpyxl gives a cell without a value the type of a
    number."""
    return cell.value is not None or cell.data_type != "n"


def _plain(value: Any) -> Any:
    """Return a cell's value with escapes in text resolved, and whole floats as int: Google Sheets writes 1.0 for 1."""
    if isinstance(value, str) and "_x00" in value:
        return _ESCAPED.sub(lambda escape: chr(int(escape[1], 16)), value)
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return int(value)
    return value


def _check_header(path: str, header: list[str], number: int, cells: Sequence[Any]) -> None:
    """Raise InputError if the row after the header looks like the real header, below a title."""
    names = [cell for cell in cells if cell is not None]
    if len(header) < len(names) and all(isinstance(name, str) for name in names):
        raise InputError(
            f"{path} row {number}: this row, with {len(names)} names, seems to be the header, and the row above it a"
            f" title, {shown(header[0])}; remove the rows above the header"
        )


def _header(path: str, number: int, cells: Sequence[Any]) -> list[str]:
    if _FORMULA in cells:
        column = cells.index(_FORMULA) + 1
        raise InputError(f"{path} row {number}: column {column} is {_NOT_COMPUTED}")
    names = [str(cell).strip() if cell is not None else "" for cell in cells]
    while not names[-1]:
        names.pop()
    check_columns(f"{path} row {number}", names)
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
