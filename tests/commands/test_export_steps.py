"""Exports of rows with several generations: a column for each step, and the keys of a rollout's dict."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq
import pytest
import tomlkit

from batchkit.execution.processor import ProductionBatchProcessor
from batchkit.storage.job_toml import job_of_run
from tests.support.command_line import batchkit
from tests.support.dry_runs import LOG, RUN, run, write_rows
from tests.support.tables import expected_table

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
NUMBER = {"extract": "number", "reference": "a", "scorers": ["em", "numeric"]}
STEPS: list[dict[str, Any]] = [
    {"name": "draft", "prompt": {"user": "{{ q }}"}, **NUMBER},
    {"name": "text", "prompt": {"user": "again"}, "when": "{{ steps.draft.scores.em < 1 }}"},
    {"name": "end", "prompt": {"user": "{{ steps.draft.text }}"}, "sampling": {"n": 2}},
]
COLUMNS = ["draft", "steps.text", "end", "draft_prediction", "draft_em", "draft_numeric"]


def make_run(n: int = 6, steps: list[dict[str, Any]] | None = None, **tables: Any) -> None:
    """The answer to row n ends in n, and every second row expects that."""
    write_rows([{"q": f"q{k}", "a": str(k if k % 2 else 99), "end": "mine"} for k in range(n)])
    job = {
        "name": "a",
        "input": {"path": "in.jsonl"},
        "engine": {"kind": "dry-run"},
        "steps": STEPS if steps is None else steps,
        **tables,
    }
    Path("job.toml").write_text(tomlkit.dumps(job))
    ended = run()
    assert ended.exit_code == 0, ended.stderr


def exported(*formats: str) -> list[dict[str, Any]]:
    done = batchkit("export", "--parquet", *formats)
    assert done.exit_code == 0, done.stderr
    found: list[dict[str, Any]] = pq.read_table(RUN / "results.parquet").to_pylist()
    return found


def test_each_step_has_columns_for_its_text_its_prediction_and_its_scores() -> None:
    make_run(output={"keep": ["end", "a"]})
    table = exported()
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


def test_csv_has_the_same_columns() -> None:
    make_run()
    lines = LOG.read_bytes().splitlines()
    failed = orjson.loads(lines[1]) | {"status": "failed", "text": None}
    failed |= {
        "error": {"kind": "server", "type": "ServerError", "message": "x", "retryable": True}
    }
    del failed["steps"]["end"]
    lines[1] = orjson.dumps(failed)
    LOG.write_bytes(b"\n".join(lines) + b"\n")
    (RUN / "checkpoint.json").unlink()
    table = exported("--csv")
    assert table == expected_table(RUN).to_pylist()
    with (RUN / "results.csv").open() as file:
        by_csv = list(csv.DictReader(file))
    assert [*by_csv[0]] == [*table[0]]
    assert [row["draft"] for row in by_csv] == [row["draft"] for row in table]


def test_a_table_in_memory_has_the_columns() -> None:
    make_run()
    summary = ProductionBatchProcessor(job_of_run(RUN), quiet=True).process()
    table = summary.to_arrow()
    assert {*COLUMNS} <= {*table.column_names}
    assert table["draft_numeric"].to_pylist() == [0.0, 1.0] * 3


def test_what_a_selection_found_has_columns() -> None:
    tables: dict[str, Any] = {"scoring": {"extract": "number"}, "select": {"by": "majority"}}
    make_run(4, [{"name": "end", "prompt": {"user": "?"}, "sampling": {"n": 3}}], **tables)
    table = exported()
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
    make_run(3, [], rollout={"function": "solve.py:solve"})
    table = exported()
    assert [row["n"] for row in table] == [2, None, 2]
    assert [row["all"] for row in table] == [[1.5], None, [1.5]]
    assert table[1]["said"] is None
    assert table[1]["text"].startswith("dry-run")
    assert [row["generations"] for row in table] == [1, 1, 1]


def test_the_keys_of_the_last_steps_json_are_columns() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 4}}}
    end = {"parse": "json", "sampling": {"structured_outputs": {"json": schema}}}
    check = {"name": "check", "prompt": {"user": "?"}, "answer": False, "parse": "json"}
    make_run(2, [STEPS[0], {"name": "end", "prompt": {"user": "?"}, **end}, check])
    assert [row["n"] for row in exported()] == [4, 4]
