"""The columns for what answers hold besides text: reasoning, tool calls, classes and scores."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.command_line import batchkit
from tests.support.dry_runs import LOG, RUN, run, write_job, write_rows
from tests.support.tables import expected_table

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

OK: dict[str, Any] = {
    "index": 0,
    "id": "q0",
    "status": "ok",
    "attempt": 1,
    "text": "yes",
    "finish_reason": "stop",
    "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    "latency_s": 0.5,
    "finished_at": "2026-11-21T01:02:03.456Z",
    "error": None,
    "fields": {},
    "input_hash": "",
}
THOUGHT = {"reasoning": "I\nthink", "usage": {**OK["usage"], "reasoning_tokens": 1}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
PARSERS = {"engine": {"model": "m", "reasoning_parser": "qwen3", "tool_call_parser": "hermes"}}
PAIR = {"query": "{{ q }}", "documents": "{{ d }}"}


def made_run(*records: dict[str, Any], **tables: Any) -> pa.Table:
    """The Parquet file of a run whose log holds ``records``."""
    write_rows([{"q": "x", "d": "y"}])
    write_job(**tables)
    if tables.get("task") == "score":
        job = Path("job.toml")
        job.write_text(job.read_text().replace('user = "{{ q }}"\n', ""))
    done = run("--fresh")
    assert done.exit_code == 0, done.stderr
    (RUN / "checkpoint.json").unlink()
    lines = ({**OK, "index": n, **record} for n, record in enumerate(records))
    LOG.write_bytes(b"".join(orjson.dumps(one, option=orjson.OPT_APPEND_NEWLINE) for one in lines))
    done = batchkit("export", "job.toml", "--parquet", "out.parquet", "--csv", "out.csv")
    assert done.exit_code == 0, done.stderr
    found = pq.read_table("out.parquet")
    assert found.equals(expected_table(RUN))
    return found


@pytest.mark.parametrize("others", [0, 600])
def test_reasoning_and_tool_calls_have_columns(others: int) -> None:
    called = {"text": "", "tool_calls": [CALL]}
    found = made_run(THOUGHT, called, {}, *[THOUGHT] * others, **PARSERS)
    assert found["reasoning"].to_pylist()[:3] == ["I\nthink", None, None]
    assert found["reasoning_tokens"].to_pylist()[:3] == [1, None, None]
    calls = found["tool_calls"].to_pylist()
    assert [calls[0], json.loads(calls[1])] == [None, [CALL]]
    with Path("out.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert json.loads(rows[1]["tool_calls"]) == [CALL]
    assert rows[0]["reasoning"] == "I\nthink"


def test_a_job_without_parsers_has_no_such_columns() -> None:
    found = made_run(THOUGHT)
    assert {"reasoning", "reasoning_tokens", "tool_calls"}.isdisjoint(found.column_names)


def test_a_kept_field_with_the_name_of_such_a_column_gets_another() -> None:
    keep = {"output": {"keep": ["reasoning"]}}
    found = made_run({**THOUGHT, "fields": {"reasoning": "mine"}}, **PARSERS, **keep)
    assert found["reasoning"].to_pylist() == ["I\nthink"]
    assert found["fields.reasoning"].to_pylist() == ["mine"]


def test_classes_have_a_label_and_probabilities() -> None:
    found = made_run(
        {"text": None, "label": "good", "probabilities": [0.75, 0.25]},
        {"text": None, "status": "failed"},
        task="classify",
    )
    assert found["label"].to_pylist() == ["good", None]
    assert found["probabilities"].to_pylist() == [[0.75, 0.25], None]


def test_scores_are_numbers_unless_a_row_gave_a_list() -> None:
    tables: dict[str, Any] = {"task": "score", "pair": PAIR}
    one, few = {"text": None, "score": 0.5}, {"text": None, "score": [0.5, 2], "order": [1, 0]}
    assert made_run(one, **tables)["score"].to_pylist() == [0.5]
    found = made_run(few, one, **tables)
    assert found["score"].to_pylist() == [[0.5, 2.0], [0.5]]
    assert found["order"].to_pylist() == [[1, 0], None]
