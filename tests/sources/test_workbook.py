"""A workbook's rows: one sheet, types kept; what is missing or broken is named."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from datetime import date, datetime
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from openpyxl import Workbook

from batchkit.config.installation import how_to_install
from batchkit.errors import InputError, RequestError
from batchkit.sources import count_rows
from tests.support.sources import rows_of, table, write, write_rows


def workbook(folder: Path, **sheets: list[list[Any]]) -> Path:
    made = Workbook()
    made.remove(made.active)
    for title, rows in sheets.items():
        sheet = made.create_sheet(title)
        for row in rows:
            sheet.append(row)
    made.save(folder / "book.xlsx")
    return folder / "book.xlsx"


def edited(path: Path, part: str, change: Callable[[bytes], bytes]) -> None:
    """The workbook at ``path``, with one of its parts changed."""
    with ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with ZipFile(path, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, change(content) if name == part else content)


def test_values_keep_their_types_and_blank_rows_are_no_rows(tmp_path: Path) -> None:
    day = datetime(2026, 1, 2)
    header = ["n", " x ", "t", "day", "flag"]
    path = workbook(tmp_path, data=[[], header, [1, 0.5, "é", day, True], [], [None, 2]])
    first, second = rows_of(path)
    assert first.fields == {"n": 1, "x": 0.5, "t": "é", "day": day, "flag": True}
    assert second.fields == {"n": None, "x": 2, "t": None, "day": None, "flag": None}
    assert (second.index, count_rows(table(path))) == (1, 2)


DAYS = [datetime(2026, 1, 2), datetime(2026, 1, 3), "2026-01-02", datetime(2026, 1, 2, 9)]


@pytest.mark.parametrize(
    ("values", "wanted", "indices"),
    [
        *((DAYS, day, [0, 2]) for day in ("2026-01-02", date(2026, 1, 2), datetime(2026, 1, 2))),
        *(([True, False, "TRUE"], flag, [0, 2]) for flag in (True, "TRUE")),
        ([True, False, "TRUE"], "true", [0]),
    ],
)
def test_where_finds_a_value_as_it_is_written(
    tmp_path: Path, values: list[Any], wanted: Any, indices: list[int]
) -> None:
    """Excel's days are midnights; people also type them as text."""
    path = workbook(tmp_path, data=[["c"], *([value] for value in values)])
    assert [row.index for row in rows_of(path, where={"c": wanted})] == indices


def test_records_names_the_sheet(tmp_path: Path) -> None:
    path = workbook(tmp_path, first=[["a"], [1]], second=[["b"], [2]])
    assert [row.fields for row in rows_of(path)] == [{"a": 1}]
    assert [row.fields for row in rows_of(path, records="second")] == [{"b": 2}]
    with pytest.raises(InputError, match="there is no sheet 'secnd'; did you mean 'second'"):
        rows_of(path, records="secnd")


@pytest.mark.parametrize("state", ["hidden", "veryHidden"])
def test_a_hidden_first_sheet_must_be_named(tmp_path: Path, state: str) -> None:
    """Who looks at the workbook sees another first sheet."""
    path = workbook(tmp_path, Sheet=[["q"], ["an older question"]], Shown=[["q"], ["a question"]])
    sheet = b'name="Sheet" sheetId="1" state="%b"'
    change = sheet % b"visible", sheet % state.encode()
    edited(path, "xl/workbook.xml", lambda xml: xml.replace(*change))
    with pytest.raises(InputError, match=r"its first sheet, 'Sheet', is hidden; .*'Shown'"):
        rows_of(path)
    assert [row.fields for row in rows_of(path, records="Shown")] == [{"q": "a question"}]
    assert [row.fields for row in rows_of(path, records="Sheet")] == [{"q": "an older question"}]


def test_a_cell_without_a_column_fails_its_row_alone(tmp_path: Path) -> None:
    path = workbook(tmp_path, data=[["a"], [1], [2, "lost"], [3]])
    good, broken, last = rows_of(path)
    assert (good.error, last.fields) == (None, {"a": 3})
    assert isinstance(broken.error, RequestError)
    assert "row 3: 'lost' is in a column without a name" in str(broken.error)


@pytest.mark.parametrize("column", ["q", "other"])
def test_formula_that_no_program_has_computed_fails_its_row_alone(
    tmp_path: Path, column: str
) -> None:
    """As pandas, openpyxl and XlsxWriter write it: its value is missing, or 0."""
    path = workbook(tmp_path, data=[[column], ["tea"], ['="ca" & "ke"'], ["=tea"], ["milk"]])
    first, second, third, last = rows_of(path)
    assert [first.fields, last.fields] == [{column: "tea"}, {column: "milk"}]
    for row, number in ((second, 3), (third, 4)):
        assert isinstance(row.error, RequestError)
        assert f"row {number}, column '{column}': is a formula without a value" in str(row.error)


@pytest.mark.parametrize("formula", [[], ["=a"]])
def test_texts_are_those_that_excel_shows(tmp_path: Path, formula: list[str]) -> None:
    """The file has ``_x000D_`` for the \\r of a line break, and ``_x005F_`` for a text like that."""
    texts = ["tea_x000D_\nor milk", "a_x005F_x000D_", "_x0020_"]
    rows = rows_of(workbook(tmp_path, data=[["q"], *([text] for text in texts), formula]))
    assert [row.fields["q"] for row in rows[:3]] == ["tea\r\nor milk", "a_x000D_", "_x0020_"]


_PREFIXED = (
    b'<x:c xmlns:x="http://schemas.openxmlformats.org/spreadsheetml/2006/main" r="A3">'
    b"<x:f>A2</x:f></x:c>"
)


@pytest.mark.parametrize(
    ("number", "value"),
    [(b"2020.0", 2020), (b"1.23456789E8", 123456789), (b"0.5", 0.5), (b"1E+300", 1e300)],
)
@pytest.mark.parametrize("formula", [[], ["=a"]])
def test_whole_number_is_one_however_the_program_writes_it(
    tmp_path: Path, number: bytes, value: float, formula: list[str]
) -> None:
    """Google Sheets and Apache POI write each with a point; prompts and ids had 2020.0."""
    path = workbook(tmp_path, data=[["id", "b"], [7, 1], *([text, 2] for text in formula)])
    change = b"<v>7</v>", b"<v>%b</v>" % number
    edited(path, "xl/worksheets/sheet1.xml", lambda xml: xml.replace(*change))
    row = rows_of(path, id="id")[0]
    assert (row.id, str(row.fields["id"])) == (str(value), str(value))


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        (b'<c r="A3"><f>A2</f></c>', "missing"),  # as excelize writes it, and others in Go and .NET
        (_PREFIXED, "missing"),
        (b'<c r="A3"><f>A2</f><v></v></c>', "missing"),
        (b'<c r="A3"><f t="shared" si="0"/><v/></c>', "missing"),
        (b'<c r="A3" t="str"><f>IF(A2&gt;1,"")</f><v></v></c>', None),
        (b'<c r="A3" t="str"><f>A2</f><v>tea</v></c>', "tea"),
        (b'<c r="A3"><f>1&gt;0</f><v>1</v></c>', 1),
    ],
)
def test_formula_without_a_value_fails_its_row_whatever_program_wrote_it(
    tmp_path: Path, cell: bytes, value: Any
) -> None:
    """Without a word in the workbook that its values are still to be computed."""
    path = workbook(tmp_path, data=[["a", "b"], ["tea", 1], ["=A2", 2], ["milk", 3]])
    edited(path, "xl/workbook.xml", lambda xml: re.sub(rb"<calcPr[^>]*/>", b"", xml))

    def with_cell(xml: bytes) -> bytes:
        start, _, rest = xml.partition(b'<c r="A3">')
        return start + cell + rest.partition(b"</c>")[2]

    edited(path, "xl/worksheets/sheet1.xml", with_cell)
    first, formula, last = rows_of(path)
    assert [first.fields, last.fields] == [{"a": "tea", "b": 1}, {"a": "milk", "b": 3}]
    if value == "missing":
        assert "row 3, column 'a': is a formula without a value" in str(formula.error)
    else:
        assert formula.fields == {"a": value, "b": 2}


@pytest.mark.parametrize(
    ("sheets", "problem"),
    [
        ({"data": []}, "the sheet is empty"),
        ({"notes": [], "data": [["q"]]}, "input.records selects the sheet, one of: 'notes', 'da"),
        ({"data": [["a", None, "b"], [1, 2, 3]]}, "row 1: column 2 of 3 has no name"),
        ({"data": [["a", "a "], [1, 2]]}, "row 1: two columns are named 'a'"),
        ({"data": [["=A2"], ["tea"]]}, "row 1: column 1 is a formula without a value"),
        ({"data": [["Of 2026"], ["id", "q"], [1, "a"]]}, "row 2: this row, with 2 names, seems to"),
    ],
)
def test_a_header_that_can_not_be_used_is_an_error(
    tmp_path: Path, sheets: dict[str, list[list[Any]]], problem: str
) -> None:
    with pytest.raises(InputError, match=re.escape(problem)):
        rows_of(workbook(tmp_path, **sheets))


def test_what_is_no_workbook_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"not an .xlsx workbook: .*save it again as .xlsx"):
        rows_of(write(tmp_path, "x.xlsx", b"\xd0\xcf\x11\xe0 an old .xls"))


def test_a_workbook_cut_in_its_middle_is_an_error(tmp_path: Path) -> None:
    path = write_rows(tmp_path, "x.xlsx", [{"a": n} for n in range(5000)])
    edited(path, "xl/worksheets/sheet1.xml", lambda sheet: sheet[: len(sheet) // 2])
    with pytest.raises(InputError, match=r"broken workbook after row 2\d\d\d"):
        rows_of(path)


def test_without_openpyxl_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(tmp_path, "x.xlsx")
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    words = re.escape(f"an Excel workbook needs openpyxl: {how_to_install('excel')}")
    with pytest.raises(InputError, match=words):
        rows_of(path)
