"""The keys of parsed answers are typed columns, whichever way a line is read."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.command_line import batchkit
from tests.support.dry_runs import LOG, RUN, prepare, run, write_job
from tests.support.rows import read_jsonl

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "n": {"type": "integer", "minimum": 4},
        "price": {"type": "number"},
        "is_new": {"type": "boolean"},
        "mood": {"anyOf": [{"$ref": "#/$defs/Mood"}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "box": {"type": "object", "properties": {"x": {"type": "integer"}}},
    },
    "$defs": {"Mood": {"type": "string", "enum": ["good", "bad"]}},
}


def make_run(answers: list[Any], **tables: dict[str, Any]) -> None:
    """A finished run whose records have these parsed answers."""
    prepare(len(answers), output={"parse": "json", "keep": ["q"]}, **tables)
    assert run().exit_code == 0
    made = read_jsonl(LOG)
    for record, answer in zip(made, answers, strict=True):
        record |= {"text": json.dumps(answer), "parsed": answer}
    LOG.write_text("".join(json.dumps(record) + "\n" for record in made))
    (RUN / "checkpoint.json").unlink()


def exported() -> pa.Table:
    done = batchkit("export", "--parquet", "out.parquet", "--csv", "out.csv")
    assert done.exit_code == 0, done.stderr
    return pq.read_table("out.parquet")


def of_keys(table: pa.Table) -> dict[str, str]:
    """The types of the columns that the answers' keys have."""
    types = {field.name: str(field.type) for field in table.schema}
    names = table.column_names[table.column_names.index("truncated_tokens") + 1 : -1]
    return {name: types[name].replace("element: ", "").replace("item: ", "") for name in names}


def test_columns_are_those_of_the_schema_whatever_was_answered() -> None:
    prepare(3, output={"parse": "json"}, sampling={"structured_outputs": {"json": SCHEMA}})
    assert run().exit_code == 0  # the dry-run engine answers with JSON that fits
    table = exported().to_pylist()
    assert [row["n"] for row in table] == [4, 4, 4]
    assert {key: table[1][key] for key in SCHEMA["properties"]} == {
        "title": "dry-run: no model answered row 1",
        "n": 4,
        "price": 0.0,
        "is_new": False,
        "mood": "good",
        "tags": [],
        "box": '{"x":0}',
    }


def test_types_of_a_schema_hold_without_values() -> None:
    make_run([{}], sampling={"structured_outputs": {"json": SCHEMA}})
    assert of_keys(exported()) == {
        "title": "string",
        "n": "int64",
        "price": "double",
        "is_new": "bool",
        "mood": "string",
        "tags": "list<string>",
        "box": "string",
    }


def test_types_are_found_in_the_answers() -> None:
    make_run(
        [
            {"n": 1, "price": 1, "tags": [], "mixed": 1, "none": None, "big": 2**63},
            {"n": None, "price": 1.5, "tags": ["a", None], "mixed": "x", "ok": True, "big": 1},
            [1, 2],
            {"tags": ["b"], "sizes": [1, 2.5], "deep": [[1]], "many": ["a", 1], "é.x": 7},
        ]
    )
    table = exported()
    assert of_keys(table) == {
        "n": "int64",
        "price": "double",
        "tags": "list<string>",
        "mixed": "string",
        "none": "string",
        "big": "string",
        "ok": "bool",
        "sizes": "list<double>",
        "deep": "string",
        "many": "string",
        "é.x": "int64",
    }
    rows = table.to_pylist()
    assert [row["price"] for row in rows] == [1.0, 1.5, None, None]
    assert [row["tags"] for row in rows] == [[], ["a", None], None, ["b"]]
    assert [row["mixed"] for row in rows] == ["1", "x", None, None]
    assert [row["big"] for row in rows] == [str(2**63), "1", None, None]
    assert (rows[3]["deep"], rows[3]["many"], rows[3]["é.x"]) == ("[[1]]", '["a",1]', 7)
    assert rows[2]["text"] == "[1, 2]"


def test_arrow_reads_them_as_python_does() -> None:
    """The last line has what Arrow can't read, so all of the batch is read record by record."""
    plain = [{"n": n, "price": n / 2, "tags": [f"{n}"], "ok": n > 1} for n in range(5)]
    make_run(plain)
    by_arrow = exported()
    with LOG.open("a") as file:
        record = read_jsonl(LOG)[0] | {"index": 5, "choices": [{"text": "x"}, {"text": "y"}]}
        file.write(json.dumps(record) + "\n")
    assert exported().slice(0, 5).equals(by_arrow)


def test_a_key_with_the_name_of_a_column_gives_way() -> None:
    make_run([{"text": "mine", "q": "its"}])
    (row,) = exported().to_pylist()
    assert (row["text"], row["parsed.text"]) == ('{"text": "mine", "q": "its"}', "mine")
    assert (row["q"], row["fields.q"]) == ("its", "question 0")


def test_csv_has_lists_as_json() -> None:
    make_run([{"tags": ["a", "b"], "n": 1}])
    exported()
    with Path("out.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["tags"], row["n"]) == ('["a","b"]', "1")


def test_answers_with_ever_other_keys_have_a_bounded_number_of_columns() -> None:
    make_run([{f"k{n}": n for n in range(5000)}, {"late": 1}])
    assert len(of_keys(exported())) == 1000


def test_a_failed_row_has_nulls() -> None:
    prepare(2, output={"parse": "json"})
    write_job(output={"parse": "json"}, prompt={"user": "{{ q if key == 'k0' else 1/0 }}"})
    assert run().exit_code == 3
    first, second = exported().to_pylist()
    assert first["answer"] == "dry-run: no model answered row 0"
    assert (second["status"], second["answer"]) == ("failed", None)
