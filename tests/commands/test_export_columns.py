"""The columns for what answers hold besides text: reasoning, tool calls, classes, scores, steps, and the keys of
parsed answers and of a function's dicts."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchkit import Run
from tests.support.command_line import batchkit
from tests.support.dry_runs import LOG, RUN, run, write_job, write_rows
from tests.support.rows import read_jsonl
from tests.support.tables import expected_table

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

THOUGHT = {
    "reasoning": "I\nthink",
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "reasoning_tokens": 1},
}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
PARSERS = {"engine": {"model": "m", "reasoning_parser": "qwen3", "tool_call_parser": "hermes"}}
PARSED = {"output": {"parse": "json", "keep": ["q"]}}
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


def exported() -> pa.Table:
    """The Parquet file, which holds what the records say; the CSV file has the same columns."""
    batchkit("export", "--parquet", "out.parquet", "--csv", "out.csv").ok()
    found = pq.read_table("out.parquet")
    assert found.equals(expected_table(RUN))
    with Path("out.csv").open(newline="", encoding="utf-8") as file:
        assert next(csv.reader(file)) == found.column_names
    return found


def in_csv() -> list[dict[str, str]]:
    with Path("out.csv").open(newline="", encoding="utf-8") as file:
        return [*csv.DictReader(file)]


def made_run(*changes: dict[str, Any], **tables: Any) -> pa.Table:
    """The table of a run whose log holds ok records with these ``changes``."""
    write_rows([{"q": "question 0", "d": "y"}])
    write_job(**tables)
    run("--fresh").ok()
    (RUN / "checkpoint.json").unlink()
    (plain,) = read_jsonl(LOG)
    lines = [{**plain, "index": n, **change} for n, change in enumerate(changes)]
    LOG.write_bytes(b"".join(orjson.dumps(one, option=orjson.OPT_APPEND_NEWLINE) for one in lines))
    return exported()


def of_answers(*answers: Any, **tables: Any) -> pa.Table:
    parsed = [{"text": json.dumps(answer), "parsed": answer} for answer in answers]
    return made_run(*parsed, **PARSED, **tables)


def of_keys(table: pa.Table) -> dict[str, str]:
    """The types of the columns that the answers' keys have."""
    types = {field.name: str(field.type) for field in table.schema}
    names = table.column_names[table.column_names.index("truncated_tokens") + 1 :]
    return {name: types[name].replace("element: ", "").replace("item: ", "") for name in names}


def test_reasoning_and_tool_calls_have_columns() -> None:
    found = made_run(THOUGHT, {"text": "", "tool_calls": [CALL]}, {}, **PARSERS)
    assert found["reasoning"].to_pylist() == ["I\nthink", None, None]
    assert found["reasoning_tokens"].to_pylist() == [1, None, None]
    calls = found["tool_calls"].to_pylist()
    assert [calls[0], json.loads(calls[1])] == [None, [CALL]]
    rows = in_csv()
    assert json.loads(rows[1]["tool_calls"]) == [CALL]
    assert rows[0]["reasoning"] == "I\nthink"


def test_a_job_without_parsers_has_no_such_columns() -> None:
    found = made_run(THOUGHT)
    assert {"reasoning", "reasoning_tokens", "tool_calls"}.isdisjoint(found.column_names)


def test_a_kept_field_or_a_key_with_the_name_of_a_column_gets_another() -> None:
    keep = {"output": {"keep": ["reasoning"]}, "run": {"check_rows": 0}}
    found = made_run({**THOUGHT, "fields": {"reasoning": "mine"}}, **PARSERS, **keep)
    assert found["reasoning"].to_pylist() == ["I\nthink"]
    assert found["fields.reasoning"].to_pylist() == ["mine"]
    (row,) = of_answers({"text": "mine", "q": "its"}).to_pylist()
    assert (row["text"], row["parsed.text"]) == ('{"text": "mine", "q": "its"}', "mine")
    assert (row["q"], row["fields.q"]) == ("its", "question 0")


def test_classes_have_a_label_and_probabilities() -> None:
    error = {"kind": "oom", "type": "E", "message": "m", "retryable": True}
    found = made_run(
        {"text": None, "label": "good", "probabilities": [0.75, 0.25]},
        {"text": None, "label": None, "probabilities": None, "status": "failed", "error": error},
        task="classify",
    )
    assert found["label"].to_pylist() == ["good", None]
    assert found["probabilities"].to_pylist() == [[0.75, 0.25], None]


def test_scores_are_numbers_unless_a_row_gave_a_list() -> None:
    pair = {"query": "{{ q }}", "documents": "{{ d }}"}
    tables: dict[str, Any] = {"task": "score", "prompt": None, "pair": pair}
    one, few = {"text": None, "score": 0.5}, {"text": None, "score": [0.5, 2], "order": [1, 0]}
    assert made_run(one, **tables)["score"].to_pylist() == [0.5]
    found = made_run(few, one, **tables)
    assert found["score"].to_pylist() == [[0.5, 2.0], [0.5]]
    assert found["order"].to_pylist() == [[1, 0], None]
    assert json.loads(in_csv()[0]["score"]) == [0.5, 2]
    assert "→ document 1: 2, document 0: 0.5" in batchkit("show", str(RUN)).stdout
    assert batchkit("report", str(RUN)).exit_code == 0
    assert "document 1: 2, document 0: 0.5" in (RUN / "report.html").read_text()


# Parsed answers


def test_columns_are_those_of_the_schema_whatever_was_answered() -> None:
    write_rows(1)
    write_job(output={"parse": "json"}, sampling={"structured_outputs": {"json": SCHEMA}})
    assert run().exit_code == 0  # the dry-run engine answers with JSON that fits
    (row,) = exported().to_pylist()
    assert {key: row[key] for key in SCHEMA["properties"]} == {
        "title": "dry-run: no model answered row 0",
        "n": 4,
        "price": 0.0,
        "is_new": False,
        "mood": "good",
        "tags": [],
        "box": '{"x":0}',
    }
    assert of_keys(of_answers({}, sampling={"structured_outputs": {"json": SCHEMA}})) == {
        "title": "string",
        "n": "int64",
        "price": "double",
        "is_new": "bool",
        "mood": "string",
        "tags": "list<string>",
        "box": "string",
    }


def test_types_are_found_in_the_answers() -> None:
    table = of_answers(
        {"n": 1, "price": 1, "tags": [], "mixed": 1, "none": None, "big": 2**63},
        {"n": None, "price": 1.5, "tags": ["a", None], "mixed": "x", "ok": True, "big": 1},
        [1, 2],
        {"tags": ["b"], "sizes": [1, 2.5], "deep": [[1]], "many": ["a", 1], "é.x": 7},
    )
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
    assert (in_csv()[1]["tags"], in_csv()[1]["n"]) == ('["a",null]', "")


def test_answers_with_ever_other_keys_have_a_bounded_number_of_columns() -> None:
    assert len(of_keys(of_answers({f"k{n}": n for n in range(5000)}, {"late": 1}))) == 1000


# Rows with several generations

NUMBER = {"extract": "number", "reference": "a", "scorers": ["em", "numeric"]}
STEPS: list[dict[str, Any]] = [
    {"name": "draft", "prompt": {"user": "{{ q }}"}, **NUMBER},
    {"name": "text", "prompt": {"user": "again"}, "when": "{{ steps.draft.scores.em < 1 }}"},
    {"name": "end", "prompt": {"user": "{{ steps.draft.text }}"}, "sampling": {"n": 2}},
]


def stepped(n: int, steps: list[dict[str, Any]], **tables: Any) -> list[dict[str, Any]]:
    """The answer to row n ends in n, and every second row expects that."""
    write_rows([{"q": f"q{k}", "a": str(k if k % 2 else 99), "end": "mine"} for k in range(n)])
    write_job(prompt=None, steps=steps, **tables)
    run().ok()
    return exported().to_pylist()


def test_each_step_has_columns_for_its_text_its_prediction_and_its_scores() -> None:
    table = stepped(6, STEPS, output={"keep": ["end", "a"]})
    said = [f"dry-run: no model answered row {n}" for n in range(6)]
    assert [row["draft"] for row in table] == said
    assert [row["end"] for row in table] == said
    assert [row["steps.text"] for row in table] == [
        said[n] if n % 2 == 0 else None for n in range(6)
    ]
    assert [row["draft_prediction"] for row in table] == [str(n) for n in range(6)]
    assert [row["draft_em"] for row in table] == [float(n % 2) for n in range(6)]
    assert [row["generations"] for row in table] == [3 - n % 2 for n in range(6)]
    assert {row["fields.end"] for row in table} == {"mine"}
    assert [row["text"] for row in table] == said
    in_memory = Run(RUN).to_arrow(inputs=True)
    assert in_memory["draft_numeric"].to_pylist() == [0.0, 1.0] * 3


def test_what_a_selection_found_has_columns() -> None:
    tables: dict[str, Any] = {"scoring": {"extract": "number"}, "select": {"by": "majority"}}
    steps = [{"name": "end", "prompt": {"user": "{{ q }}?"}, "sampling": {"n": 3}}]
    table = stepped(4, steps, **tables)
    assert [row["selected"] for row in table] == [0] * 4
    assert [json.loads(row["votes"]) for row in table] == [{str(n): 3} for n in range(4)]
    assert {row["choices"] for row in table} == {None}


def test_the_keys_of_what_a_function_returned_are_columns() -> None:
    Path("solve.py").write_text(
        "async def solve(row, generate):\n"
        "    answer = await generate(row['q'])\n"
        "    if row['q'] == 'q1':\n"
        "        return answer.text\n"
        "    return {'n': len(row['q']), 'said': answer.text, 'all': [1.5]}\n"
    )
    table = stepped(3, [], rollout={"function": "solve.py:solve"})
    assert [row["n"] for row in table] == [2, None, 2]
    assert [row["all"] for row in table] == [[1.5], None, [1.5]]
    assert table[1]["said"] is None
    assert table[1]["text"].startswith("dry-run")
    assert [row["generations"] for row in table] == [1, 1, 1]


def test_the_keys_of_the_last_steps_json_are_columns() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 4}}}
    end = {"parse": "json", "sampling": {"structured_outputs": {"json": schema}}}
    check = {"name": "check", "prompt": {"user": "{{ q }}?"}, "answer": False, "parse": "json"}
    table = stepped(2, [STEPS[0], {"name": "end", "prompt": {"user": "{{ q }}?"}, **end}, check])
    assert [row["n"] for row in table] == [4, 4]
