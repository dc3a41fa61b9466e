"""A run as an input: its newest answers are the rows of another run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from batchkit.config.tables import InputTable
from batchkit.sources import count_rows, read_rows
from batchkit.sources.finding import listing
from tests.support import dry_runs
from tests.support.command_line import batchkit
from tests.support.rows import read_jsonl, write_jsonl

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

FOLDER = "output/a"
CHECKED = Path("output/check/results.jsonl")


def write_draft(rows: list[dict[str, Any]], **tables: dict[str, Any]) -> int:
    """Run it; returns the exit code."""
    dry_runs.write_rows(rows)
    keys = {"input": {"id": "key"}, "output": {"keep": ["key", "q", "text"]}}
    dry_runs.write_job(**keys | tables)
    return dry_runs.run().exit_code


def check(*args: str, **keys: str) -> Any:
    """Run the job that reads the draft."""
    job = {
        "name": "check",
        "input": {"path": FOLDER, **keys},
        "prompt": {"user": "{{ q }}: {{ text }}"},
        "engine": {"kind": "dry-run"},
        "output": {"keep": ["q", "text"]},
    }
    Path("check.toml").write_text(tomlkit.dumps(job))
    return batchkit("run", "check.toml", *args)


def row(n: int) -> dict[str, Any]:
    return {"key": f"k{n}", "q": f"question {n}", "text": "of the input"}


def test_answers_of_a_run_are_the_rows_of_the_next() -> None:
    assert write_draft([row(n) for n in range(5)]) == 0
    assert check().exit_code == 0  # its template has a field of the row and its answer
    drafts = {record["id"]: record["text"] for record in read_jsonl(dry_runs.LOG)}
    checks = sorted(read_jsonl(CHECKED), key=lambda record: int(record["index"]))
    assert [(record["id"], record["fields"]) for record in checks] == [
        (f"k{n}", {"q": f"question {n}", "text": drafts[f"k{n}"]}) for n in range(5)
    ]
    again = check()
    assert (again.exit_code, len(read_jsonl(CHECKED))) == (0, 5)


def test_row_has_the_kept_fields_and_the_answer() -> None:
    scoring = {"extract": "text", "scorers": ["em"], "reference": "ref"}
    write_draft([row(0) | {"ref": "x"}], scoring=scoring)
    record = read_jsonl(dry_runs.LOG)[0]
    (found,) = read_rows(InputTable(path=FOLDER))
    kept = {"key": "k0", "q": "question 0", "text": "of the input", "ref": "x"}
    assert found.id == "k0"
    answer = {name: record[name] for name in ("id", "status", "text", "prediction", "scores")}
    assert found.fields == kept | answer | {"fields": kept}


def test_row_has_the_columns_of_the_input_that_were_not_kept() -> None:
    write_draft([row(n) for n in range(3)], output={"keep": []})
    first, *_ = read_rows(InputTable(path=FOLDER))
    answered = read_jsonl(dry_runs.LOG)[0]["text"]
    assert [first.fields[name] for name in ("key", "q", "text")] == ["k0", "question 0", answered]
    assert first.fields["fields"] == {"text": "of the input"}  # whose name the answer takes
    assert check().exit_code == 0


@pytest.mark.parametrize(
    ("change", "said", "ids_with_columns"),
    [
        (lambda rows: rows.unlink(), "in.jsonl: no file matches", []),
        (
            lambda rows: rows.write_text(rows.read_text().replace("question 1", "other")),
            "in.jsonl has changed (",
            ["k0", "k2"],
        ),
    ],
)
def test_input_that_is_gone_or_changed_is_reported(
    change: Callable[[Path], Any], said: str, ids_with_columns: list[str]
) -> None:
    write_draft([row(n) for n in range(3)], output={"keep": []})
    change(Path("in.jsonl"))
    table = InputTable(path=FOLDER)
    assert said in listing(table).left_out
    assert "only the columns in" in listing(table).left_out
    assert [found.id for found in read_rows(table) if "q" in found.fields] == ids_with_columns


def test_input_that_only_a_run_folder_of_others_names_is_not_opened() -> None:
    write_draft([row(0)], output={"keep": []})
    Path("job.toml").unlink()
    (found,) = read_rows(InputTable(path=FOLDER))
    assert "q" not in found.fields
    assert "the job file of this run was not found" in listing(InputTable(path=FOLDER)).left_out


def test_newest_record_of_each_row_in_the_order_of_the_input() -> None:
    write_draft([row(n) for n in range(3)])
    records = read_jsonl(dry_runs.LOG)
    (Path(FOLDER) / "checkpoint.json").unlink()
    newer = [record | {"text": f"newer {record['index']}"} for record in reversed(records)]
    write_jsonl(dry_runs.LOG, [*reversed(records), *newer])
    found = list(read_rows(InputTable(path=FOLDER)))
    assert [(row.index, row.fields["text"]) for row in found] == [
        (n, f"newer {n}") for n in range(3)
    ]


@pytest.mark.parametrize(
    ("where", "ids"),
    [
        ({}, ["k0", "k2"]),
        ({"status": "failed"}, ["k1"]),
        ({"status": ["ok", "failed"]}, ["k0", "k1", "k2"]),
        ({"q": "question 2"}, ["k2"]),
    ],
)
def test_failed_rows_are_left_out_unless_where_names_their_status(
    where: dict[str, Any], ids: list[str]
) -> None:
    assert write_draft([row(0), {"key": "k1"}, row(2)]) == 3
    table = InputTable(path=FOLDER, where=where)
    assert [found.id for found in read_rows(table)] == ids
    assert count_rows(table) == len(ids)
    said = f"{FOLDER}: 1 failed rows are left out; input.where = " if "status" not in where else ""
    assert listing(table).left_out.startswith(said)
    assert bool(listing(table).left_out) == bool(said)


def test_scores_that_were_computed_later_are_those_of_the_rows() -> None:
    write_draft([row(0) | {"ref": "x"}], output={"keep": ["q", "ref"]})
    scoring = '\n[scoring]\nextract = "text"\nscorers = ["em"]\nreference = "ref"\n'
    with Path("job.toml").open("a") as job:
        job.write(scoring)
    assert check().exit_code == 0
    assert batchkit("score", "job.toml").exit_code == 0
    (found,) = read_rows(InputTable(path=FOLDER))
    assert found.fields["scores"] == {"em": 0.0}
    assert "changed" in check().stderr


def test_log_that_changed_is_a_changed_input() -> None:
    write_draft([row(0), {"key": "k1"}])
    assert check().exit_code == 0
    batchkit("retry-failed", FOLDER)
    refused = check()
    assert refused.exit_code == 2
    assert f"input {Path(FOLDER).resolve()}/results.jsonl: " in refused.stderr
    assert check("--on-change", "requeue").exit_code == 0
    assert len(read_jsonl(CHECKED)) == 1


def test_unfinished_run_is_reported() -> None:
    write_draft([row(n) for n in range(5)], run={"sample": 2})
    said = "the run is not finished: 2 of 5 rows have a record"
    assert said in check().stderr
    assert len(read_jsonl(CHECKED)) == 2


@pytest.mark.parametrize(
    ("path", "named"), [("output", "output"), ("s3://bucket/a", "s3:/bucket/a")]
)
def test_folder_that_is_no_run_is_refused(path: str, named: str) -> None:
    Path("output").mkdir()
    ended = check(path=path, format="run")
    assert ended.exit_code == 2
    assert f"{named}: there is no run in this folder; give the folder of a run" in ended.stderr
