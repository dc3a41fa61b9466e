"""``summary.to_arrow()`` and ``to_pandas()``: the input's rows beside their answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from PIL import Image

from batchkit.errors import InputError, StoreError, TooManyFailuresError
from batchkit.execution.processor import ProductionBatchProcessor
from batchkit.execution.summary import RunSummary
from tests.support.dry_runs import job, write_rows
from tests.support.rows import write_jsonl

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

RECORD = ["index", "id", "status", "attempt", "text", "finish_reason"]


def process(rows: Any = None, **tables: dict[str, Any]) -> RunSummary:
    return ProductionBatchProcessor(job(**tables), quiet=True).process(rows)


def answer(index: int) -> str:
    return f"dry-run: no model answered row {index}"


def test_a_dataframe_comes_back_with_its_columns_its_index_and_the_answers() -> None:
    frame = pd.DataFrame(
        {"q": ["tea", "coffee", None], "n": [1.5, None, 3.0]}, index=["x", "y", "y"]
    )
    frame["day"] = pd.to_datetime(["2026-01-01", "2026-01-02", None])
    found = process(frame, prompt={"user": "{{ q }} {{ n }}"}).to_pandas()
    assert list(found.columns[:9]) == ["q", "n", "day", *RECORD]
    pd.testing.assert_frame_equal(
        found[["q", "n", "day"]], frame, check_dtype=False, check_column_type=False
    )
    assert list(found["text"]) == [answer(n) for n in range(3)]


def test_long_numbers_stay_what_they_are_where_others_are_missing() -> None:
    """As floats, the two would be one number."""
    one, other = 2**60 + 1, 2**60 + 3
    frame = pd.DataFrame({"n": pd.array([one, other, None], dtype="Int64")})
    frame["in"] = [{"n": one}, {"n": other}, {"n": None}]
    found = process(frame, prompt={"user": "{{ n }}"}).to_pandas()
    assert found["n"].dtype == found["truncated_tokens"].dtype == "Int64"
    assert [*found["n"].dropna()] == [one, other]
    assert [inside["n"] for inside in found["in"]] == [one, other, None]


def test_columns_with_the_name_of_a_record_s_get_a_prefix() -> None:
    rows = [{"text": "tea", "id": "a", "status": 1}, {"text": "coffee", "id": "b", "status": 2}]
    table = process(rows, prompt={"user": "{{ text }}"}).to_arrow()
    assert table.column_names[:3] == ["fields.text", "id", "fields.status"]
    assert table["fields.text"].to_pylist() == ["tea", "coffee"]
    assert table["text"].to_pylist() == [answer(0), answer(1)]
    assert table["id"].to_pylist() == ["a", "b"]


def test_the_column_that_names_the_rows_is_there_once_and_as_it_was() -> None:
    rows = [{"id": 11, "q": "tea"}, {"id": 12, "q": "coffee"}]
    tables: dict[str, Any] = {"input": {"id": "id"}, "prompt": {"user": "{{ q }}"}}
    table = process(rows, **tables).to_arrow()
    assert table.column_names[:4] == ["id", "q", "index", "status"]
    assert table["id"].to_pylist() == [11, 12]


def test_values_without_an_arrow_type_are_text_and_images_are_left_out() -> None:
    rows = [
        {"prompt": "a", "mixed": 1, "image": Image.new("RGB", (2, 2)), "list": [1]},
        {"prompt": "b", "mixed": "x", "image": None, "more": "\ud83d"},
        {"prompt": "c", "mixed": {"k": [10**40]}, "image": None},
    ]
    table = process(rows).to_arrow()
    assert table.column_names[:4] == ["fields.prompt", "mixed", "list", "more"]
    assert "image" not in table.column_names
    assert table["mixed"].to_pylist()[:2] == ["1", "x"]
    assert table["list"].to_pylist() == [[1], None, None]
    assert table["more"].to_pylist() == [None, "?", None]


def test_rows_without_a_record_are_null_and_failed_ones_have_their_error() -> None:
    rows = [{"q": f"{n}"} if n % 2 else {"other": n} for n in range(60)]
    table: dict[str, Any] = {"prompt": {"user": "{{ q }}"}, "run": {"fail_on_error": True}}
    outcome = ProductionBatchProcessor(job(**table), quiet=True).start(rows)
    assert isinstance(outcome.error, TooManyFailuresError)
    found = outcome.summary.to_arrow()
    records = {record["index"]: record for record in outcome.summary.records()}
    assert 0 < len(records) < 60
    assert found["index"].to_pylist() == list(range(60))
    assert found["q"].to_pylist() == [row.get("q") for row in rows]
    status = [records[n]["status"] if n in records else None for n in range(60)]
    assert found["status"].to_pylist() == status
    assert found["error_kind"][0].as_py() == "template"


def test_the_rows_of_a_file_are_those_that_ran() -> None:
    write_rows([{"q": f"question {n}", "odd": n % 2} for n in range(10)])
    tables: dict[str, Any] = {
        "input": {"path": "in.jsonl", "where": {"odd": 1}, "limit": 3},
        "prompt": {"user": "{{ q }}"},
    }
    found = process(**tables).to_arrow()
    assert found["index"].to_pylist() == [1, 3, 5]
    assert found["q"].to_pylist() == ["question 1", "question 3", "question 5"]
    assert found["text"].to_pylist() == [answer(1), answer(3), answer(5)]


def test_the_answers_of_a_changed_input_are_not_put_beside_its_rows() -> None:
    rows = write_rows(3)
    tables: dict[str, Any] = {"input": {"path": "in.jsonl"}, "prompt": {"user": "{{ q }}"}}
    from_file, given = process(**tables), [dict(row) for row in rows]
    from_list = process(given, prompt={"user": "{{ q }}"}, output={"dir": "other"})
    write_jsonl(Path("in.jsonl"), list(reversed(rows)))
    given.reverse()
    for summary in (from_file, from_list):
        with pytest.raises(InputError, match=r"changed since the run read it.*rows\(\)"):
            summary.to_arrow()
        assert len(list(summary.records())) == 3


def test_answers_of_another_run_in_the_same_folder_are_refused() -> None:
    rows, tables = [{"q": "tea"}, {"q": "cake"}], {"prompt": {"user": "{{ q }}"}}
    summary = process(rows, **tables)
    process(iter(rows), **tables)
    for read in (summary.records, summary.to_arrow, summary.to_pandas):
        with pytest.raises(StoreError, match=r"output/a: holds another run since .*a\.1"):
            read()


def test_answers_that_were_requeued_for_other_rows_are_not_put_beside_these() -> None:
    rows, tables = [{"q": "tea"}, {"q": "cake"}], {"prompt": {"user": "{{ q }}"}}
    summary = process(rows, **tables)
    again = ProductionBatchProcessor(job(**tables), quiet=True, on_change="requeue")
    assert again.process(rows[::-1]).to_arrow()["q"].to_pylist() == ["cake", "tea"]
    with pytest.raises(InputError, match="records were made from another input"):
        summary.to_arrow()


def test_of_rows_that_can_be_read_once_only_the_kept_fields_are_there() -> None:
    rows = iter([{"q": "tea", "n": 1}, {"q": "coffee", "n": 2}])
    found = process(rows, prompt={"user": "{{ q }}"}, output={"keep": ["q"]}).to_arrow()
    assert found["q"].to_pylist() == ["tea", "coffee"]
    assert found["text"].to_pylist() == [answer(0), answer(1)]
    assert "n" not in found.column_names


def test_no_rows_are_an_empty_table_with_the_record_s_columns() -> None:
    found = process([]).to_arrow()
    assert found.num_rows == 0
    assert found.column_names[:6] == RECORD
    assert found.schema.field("index").type == pa.int64()
