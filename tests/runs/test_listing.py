"""``batchkit ls``: the runs below a folder, with their state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command_line import batchkit
from tests.support.rows import write_jsonl

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
ONE_LINE = ("--model", "tea", "--prompt", "{{ q }}", "--set", "engine.kind=dry-run")

CUT_SHORT = ("--set", "budget.max_completion_tokens=1", "--set", "run.max_in_flight=1")


def test_runs_are_listed_with_their_state() -> None:
    write_jsonl(Path("rows.jsonl"), [{"q": "tea"}, {"q": "milk"}, {"q": 3}])
    for name, *more in (("all",), ("part", *CUT_SHORT), ("broken",)):
        batchkit("run", "--input", "rows.jsonl", *ONE_LINE, "--name", name, *more)
    (Path("output/broken.dry-run/manifest.json")).write_text("{")
    listed = batchkit("status", "output", "--json")
    runs = {run["run"].removesuffix(".dry-run"): run for run in json.loads(listed.stdout)["runs"]}
    assert {name: run["state"] for name, run in runs.items()} == {
        "all": "finished",
        "part": "stopped",
        "broken": "stopped",
    }
    assert (runs["all"]["ok"], runs["all"]["failed"], runs["all"]["pending"]) == (3, 0, 0)
    assert runs["part"]["pending"] > 0
    assert "can't be read" in runs["broken"]["error"]
    lines = batchkit("status", "output").stdout.splitlines()
    assert lines[0].startswith("| run ")
    assert len(lines) == 2 + 3 + 1, "the error below the table"


def test_a_folder_without_runs_says_so() -> None:
    Path("empty").mkdir()
    assert batchkit("status", "empty").stdout == "empty: no runs\n"
    assert batchkit("status", "missing").exit_code == 2
