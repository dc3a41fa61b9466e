"""A row that brings no id gets one that no other row can bring."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchkit.execution.processor import ProductionBatchProcessor
from batchkit.sources import read_rows
from tests.support import dry_runs
from tests.support.command_line import batchkit
from tests.support.dry_runs import RUN, run
from tests.support.rows import read_jsonl, write_jsonl
from tests.support.sources import rows_of, table, write

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

BROKEN = b'{"id": "1", "q": "cut o'


def line(row_id: Any) -> bytes:
    return json.dumps({"id": row_id, "q": "hi"}).encode()


def write_input(*lines: bytes) -> None:
    write(Path(), "in.jsonl", b"\n".join(lines) + b"\n")
    dry_runs.write_job(input={"id": "id"})


def records() -> list[dict[str, Any]]:
    return sorted(dry_runs.records(), key=lambda found: int(found["index"]))


def test_broken_line_never_takes_the_id_of_another_row() -> None:
    write_input(line("0"), BROKEN, line("1"), line("2"), b'{"q": "no id"}', line("4"))
    assert run().exit_code == 3
    failed, ids = {"no-id:1", "no-id:4"}, ["0", "no-id:1", "1", "2", "no-id:4", "4"]
    found = [(record["id"], record["status"]) for record in records()]
    assert found == [(row_id, "failed" if row_id in failed else "ok") for row_id in ids]
    assert batchkit("export", RUN, "--openai").exit_code == 0
    names = ("results.openai.jsonl", "results.openai.errors.jsonl")
    exported = [record["custom_id"] for name in names for record in read_jsonl(RUN / name)]
    assert len(set(exported)) == len(exported) == 6


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.none() | st.sampled_from(["0", "1", "2"]), min_size=1))
def test_no_two_rows_share_an_id_that_one_of_them_did_not_bring(ids: list[str | None]) -> None:
    lines = [BROKEN if one is None else line(one) for one in ids]
    rows = rows_of(write(Path(), "x.jsonl", b"\n".join(lines)), id="id")
    real = {row.id for row in rows if row.error is None}
    given_ids = [row.id for row in rows if row.error is not None]
    assert real.isdisjoint(given_ids)
    assert len(set(given_ids)) == len(given_ids)


@pytest.mark.parametrize("row", [{"q": "no id"}, {"id": None, "q": "hi"}, "a prompt"])
def test_row_from_python_without_an_id_never_takes_that_of_another(row: Any) -> None:
    job = dry_runs.job(input={"id": "id"}, prompt={"user": "{{ q | default('') }}"})
    rows = [{"id": "1", "q": "hi"}, row]
    summary = ProductionBatchProcessor(job, quiet=True).process(rows)
    assert [record["id"] for record in summary.records()] == ["1", "no-id:1"]
    # … nor is it taken for a row of another run that has none either
    other = job.model_copy(update={"name": "b"})
    skipping = ProductionBatchProcessor(other, quiet=True, skip_from=Path(summary.folder))
    assert [found["id"] for found in skipping.process(rows).records()] == ["no-id:1"]


def test_rows_of_a_file_without_ids_never_take_those_of_another_file() -> None:
    write_jsonl(Path("p1.jsonl"), [{"q": "hi"}] * 3)
    with open("p1.jsonl", "ab") as file:
        file.write(b"cut o")
    batch = [{"custom_id": str(n), "body": {"messages": []}} for n in range(4)]
    write_jsonl(Path("p2.jsonl"), batch)
    rows = rows_of("p*.jsonl")
    without = ["no-id:0", "no-id:1", "no-id:2", "no-id:3"]
    assert [row.id for row in rows] == [*without, "0", "1", "2", "3"]
    assert [row.index for row in rows if row.error is not None] == [3]
    assert [row.id for row in read_rows(table("p1.jsonl"))] == ["0", "1", "2", "3"]


def test_requeue_names_rows_as_they_are_named_without_the_files_that_had_ids() -> None:
    """Else the audit takes every record that was kept for one of another row."""
    write_jsonl(Path("p1.jsonl"), [{"prompt": "hi"}] * 3)
    write_jsonl(Path("p2.jsonl"), [{"custom_id": "x", "body": {"prompt": "hi"}}])
    Path("job.toml").write_text('name = "a"\ninput.path = "p*.jsonl"\nengine.kind = "dry-run"\n')
    assert run().exit_code == 0
    Path("p2.jsonl").unlink()
    ended = run("--on-change", "requeue")
    assert ended.exit_code == 0, ended.stderr
    assert "3 records kept" in ended.stderr
    assert [record["id"] for record in records()] == ["0", "1", "2"]
    assert batchkit("verify", RUN).exit_code == 0


@pytest.mark.parametrize(
    "first",
    [
        b'{"custom_id": "a", "body": {"mess',
        b"// made by a script",
        b"\xff",
        b'{"custom_id": "a", "url": "/v1/completions"}',
        b'{"body": {"prompt": "hi"}}',
        b'"a"',
    ],
)
def test_a_broken_first_request_of_a_batch_takes_no_id_from_the_others(first: bytes) -> None:
    """Their answers would be named by index, and not in OpenAI's format."""
    request = {"custom_id": "b", "body": {"messages": [{"role": "user", "content": "hi"}]}}
    content = first + b"\n" + json.dumps(request).encode() + b"\n"
    broken, whole = rows_of(write(Path(), "in.jsonl", content))
    assert (broken.id, whole.id) == ("no-id:0", "b")
    assert "line 1: " in str(broken.error)
