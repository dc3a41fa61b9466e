"""``merge``: shards and partial runs of one job become one run, like any other.

The dry-run engine stands in for a model wherever only the counting matters.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchkit.storage.files import building
from tests.support.command_line import batchkit
from tests.support.dry_runs import (
    manifest,
    prepare,
    process,
    records,
    run,
    settled,
    shard,
    status,
    verify,
    write_job,
    write_rows,
)
from tests.support.forks import LightFork
from tests.support.merges import MERGED, SCORING, files, merge, reported, rewrite, run_shards
from tests.support.paths import ROOT

pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.slow]


def failure(record: dict[str, Any]) -> None:
    error = {"kind": "timeout", "type": "RowTimeoutError", "message": "late", "retryable": True}
    record.update(status="failed", text=None, usage=None, error=error)


# Shards


@pytest.mark.parametrize("with_ids", [False, True])
def test_merged_shards_export_as_the_single_run(with_ids: bool) -> None:
    rows = [
        {"key": f"k{n}", "q": "x", "a": "no model", "kind": f"g{n % 3}"} if n % 10 else {"key": n}
        for n in range(120)
    ]
    random.Random(3).shuffle(rows)
    write_rows(rows)
    write_job(input={"id": "key"} if with_ids else {}, scoring=SCORING, output={"keep": ["kind"]})
    assert run().exit_code == 3
    found = merge(*run_shards(4))
    assert found.exit_code == 3
    expected = {"total": 120, "ok": 108, "failed": 12, "missing": 0, "double": 0, "conflicting": 0}
    assert found.json | expected | {"folder": str(MERGED), "exit": 3} == found.json
    assert found.json["runs"] == [str(shard(number, 4)) for number in range(4)]
    assert exported("output/a", "jsonl") == exported(MERGED, "jsonl")
    assert exported("output/a", "parquet") == exported(MERGED, "parquet")


def exported(folder: str | Path, form: str) -> list[dict[str, Any]]:
    path = Path(f"export.{form}")
    assert batchkit("export", str(folder), f"--{form}", str(path)).exit_code == 0
    rows = pq.read_table(path).to_pylist() if form == "parquet" else records(path)
    for row in rows:
        del row["finished_at"], row["latency_s"]
    return rows


def test_every_command_takes_the_merged_run() -> None:
    write_rows([{"q": "x", "a": "no", "kind": "g"} if n % 5 else {"kind": "g"} for n in range(40)])
    write_job(scoring=SCORING, output={"keep": ["kind"]})
    run()
    merge(*run_shards(3))
    single, merged = status(Path("output/a")), status(MERGED)
    same = ["total", "ok", "failed", "pending", "failed_by_kind", "prompt_tokens", "held_by"]
    assert [merged[name] for name in same] == [single[name] for name in same]
    assert (merged["name"], merged["starts"]) == ("merged", 4)
    sound = verify(MERGED)
    expected = {"rows": 40, "records": 40, "ok": 32, "failed": 8, "pending": 0, "lost": 0}
    assert sound | expected | {"duplicates": 0, "checkpoint_matches": True} == sound
    assert (MERGED / "checkpoint.json").exists()
    tables = [batchkit("score", f, "--json").json for f in ("output/a", str(MERGED))]
    assert tables[0] == tables[1]
    pages = [batchkit("report", f, "--json").json for f in ("output/a", str(MERGED))]
    assert [page.pop("path") for page in pages] == ["output/a/report.html", f"{MERGED}/report.html"]
    assert pages[0] == pages[1]
    again = batchkit("retry-failed", str(MERGED), "--set", "prompt.user=fine", "--json")
    assert again.json | {"rows": 8, "recovered": 8, "exit": 0} == again.json
    assert batchkit("status", "--json").json["name"] == "merged", "it was started last"


def test_shards_are_merged_in_steps() -> None:
    prepare(80)
    a, b, c, d = run_shards(4)
    assert merge(a, b, into="output/ab", partial=True).exit_code == 3
    assert merge(c, d, into="output/cd", partial=True).exit_code == 3
    assert reported(merge("output/ab", "output/cd"), "exit", "ok", "double") == (0, 80, 0)
    assert settled(MERGED / "results.jsonl") == dict.fromkeys(range(80), "ok")


def test_a_merge_leaves_its_runs_as_they_are_and_their_torn_ends_behind() -> None:
    prepare(50)
    shards = run_shards(3)
    with (shards[0] / "results.jsonl").open("ab") as log:
        log.write(b'{"index":29,"id":"29","status":"ok","te')
    before = {f: f.read_bytes() for s in shards for f in s.iterdir() if f.name != ".lock"}
    merged = Path("elsewhere/deep/merged")
    assert reported(merge(*shards, into=merged, partial=True), "exit", "ok") == (0, 50)
    assert {f: f.read_bytes() for s in shards for f in s.iterdir() if f.name != ".lock"} == before
    assert list(settled(merged / "results.jsonl")) == list(range(50)), "in the order of the input"
    assert verify(merged)["torn_bytes"] == 0
    assert not [path for path in Path().rglob("*") if path.name.endswith(".tmp")]
    found = manifest(merged)
    assert found["merged_from"] == [*map(str, shards)]
    assert [start["command"] for start in found["starts"]] == ["run", "run", "run", "merge"]
    assert [start.get("run") for start in found["starts"][:3]] == found["merged_from"]
    assert (found["name"], found["total"]) == ("merged", 50)
    assert "input.shard" not in found["identity"]["job"]


def test_what_a_killed_merge_has_left_is_removed_by_the_next() -> None:
    """It is killed as it gives the finished folder its name."""
    prepare()
    shards = run_shards(2)
    killed = [sys.executable, "-m", "tests.support.killed", "Path.rename", "1"]
    command = [*killed, "merge", *map(str, shards), "--into", str(MERGED)]

    def left() -> list[Path]:
        return [*Path("output").glob(".merged.*.tmp")]

    assert LightFork(command).wait(timeout=60) == -signal.SIGKILL
    assert not MERGED.exists()
    assert len(left()) == 1
    with building(MERGED) as at_work:
        assert left() == [at_work]
        assert merge(*shards).exit_code == 0
        assert left() == [at_work]
        shutil.rmtree(MERGED)


def test_shards_of_a_limited_input_are_whole() -> None:
    prepare(100)
    shards = run_shards(3, "--limit", "30")
    found = merge(*shards)
    assert reported(found, "exit", "total", "ok", "missing") == (0, 30, 30, 0)
    assert status(MERGED)["total"] == 30
    run("--shard", "0/3")
    found = merge(*shards, into="output/more")
    assert (found.exit_code, found.json["total"]) == (3, 100), "one was to answer all rows"


def test_shards_of_a_filtered_input_are_whole_also_those_without_a_row() -> None:
    write_rows([{"q": "x", "kind": "odd" if n % 2 else "even"} for n in range(6)])
    write_job(input={"where": {"kind": "odd"}})
    found = merge(*run_shards(8))
    assert reported(found, "exit", "total", "ok") == (0, 3, 3)
    assert sorted(settled(MERGED / "results.jsonl")) == [1, 3, 5]


def test_rows_from_python_are_merged() -> None:
    prompts = [f"prompt {n}" for n in range(10)]
    process(prompts)
    Path("output/a").rename("output/b")
    rewrite(Path("output/b"), lambda record: failure(record) if record["index"] < 3 else None)
    process(prompts)
    found = merge("output/a", "output/b")
    assert reported(found, "exit", "total", "ok", "failed", "double") == (0, 10, 10, 0, 7)


def test_rows_from_an_iterator_are_refused() -> None:
    process(iter(["a", "b"]))
    Path("output/a").rename("output/b")
    process(iter(["a", "b"]))
    found = merge("output/a", "output/b")
    assert (found.exit_code, MERGED.exists()) == (2, False)
    assert "iterator" in found.stderr


# Missing rows


def test_missing_rows_are_named_and_nothing_is_written() -> None:
    prepare(40, input={"id": "key"})
    a, _, c = run_shards(3)
    before = files()
    found = merge(a, c)
    n_rows = len(records(a / "results.jsonl")) + len(records(c / "results.jsonl"))
    assert reported(found, "exit", "ok", "missing", "folder") == (3, n_rows, 40 - n_rows, None)
    there = {record["id"] for part in (a, c) for record in records(part / "results.jsonl")}
    missing = [f"k{n}" for n in range(40) if f"k{n}" not in there]
    assert found.json["missing_ids"] == missing[:5]
    assert "--partial" in found.stderr
    assert files() == before
    text = batchkit("merge", str(a), str(c), "--into", str(MERGED)).stdout
    assert f"missing: {', '.join(missing[:5])} and {len(missing) - 5} more" in text
    assert "nothing written" in text


def test_partial_merge_is_carried_on_by_its_job() -> None:
    prepare(40)
    shards = run_shards(3)
    found = merge(*shards[:2], into="job.toml", partial=True)
    assert (found.exit_code, found.json["folder"]) == (3, str(Path("output/a").resolve()))
    pending = found.json["missing"]
    assert status()["pending"] == verify()["pending"] == pending > 0
    again = run()
    assert (again.exit_code, again.json["ok"], again.json["skipped"]) == (0, 40, 40 - pending)
    assert verify()["duplicates"] == 0


# A row in several runs


@pytest.fixture
def base_and_later() -> tuple[Path, Path]:
    """Two whole runs of one job, the second one later; ids are k0 to k9."""
    prepare(10, input={"id": "key"})
    run("--set", "name=base")
    run("--set", "name=later")
    rewrite(Path("output/base"), lambda record: record.update(finished_at=at("01")))
    rewrite(Path("output/later"), lambda record: record.update(finished_at=at("02")))
    return Path("output/base"), Path("output/later")


def at(hour: str) -> str:
    return f"2026-11-21T{hour}:00:00.000Z"


Change = Callable[[dict[str, Any]], object]


def unchanged(record: dict[str, Any]) -> None:
    """As the run has it."""


def calling(number: int) -> Change:
    """Answers with a tool call that is the same in both runs, but for its id, and in row 3."""

    def change(record: dict[str, Any]) -> None:
        town = f"town {number}" if record["index"] == 3 else "here"
        function = {"name": "weather", "arguments": town}
        call = {"id": f"call-{number}", "type": "function", "function": function}
        record.update(text="", tool_calls=[call])

    return change


def choosing(second: str) -> Change:
    texts = ("a", second)
    choices = [{"text": text, "finish_reason": "stop", "logprobs": None} for text in texts]
    return lambda record: record.update(choices=choices)


def late_failure(record: dict[str, Any]) -> None:
    failure(record)
    record["error"]["message"] = "later"


def from_row(first: int, change: Change) -> Change:
    return lambda record: change(record) if record["index"] >= first else None


IN_BOTH: dict[str, tuple[Change, Change, dict[str, Any], str | None]] = {
    "the same text": (unchanged, unchanged, {"double": 10}, "dry-run: no model answered row 9"),
    "another text": (
        unchanged,
        from_row(8, lambda record: record.update(text="newer")),
        {"double": 8, "conflicting": 2, "conflicting_ids": ["k8", "k9"]},
        "newer",
    ),
    "tool calls": (
        calling(1),
        calling(2),
        {"double": 9, "conflicting": 1, "conflicting_ids": ["k3"]},
        "",
    ),
    "the second choice": (
        choosing("b"),
        choosing("c"),
        {"conflicting": 10, "conflicting_ids": [f"k{n}" for n in range(5)]},
        None,
    ),
    "another label": (
        unchanged,
        from_row(9, lambda record: record.update(label="other")),
        {"double": 9, "conflicting": 1, "conflicting_ids": ["k9"]},
        None,
    ),
    "a later failure": (unchanged, from_row(6, failure), {"ok": 10, "double": 6}, None),
    "a blank answer": (
        unchanged,
        lambda record: record.update(text=" \n"),
        {"ok": 10},
        "dry-run: no model answered row 9",
    ),
    "two failures": (failure, late_failure, {"exit": 3, "ok": 0, "failed": 10}, None),
}


@pytest.mark.parametrize("case", IN_BOTH)
def test_the_newest_answer_of_a_row_counts(base_and_later: tuple[Path, Path], case: str) -> None:
    base, later = base_and_later
    *changes, expected, text = IN_BOTH[case]
    for folder, change in zip(base_and_later, changes, strict=True):
        rewrite(folder, change)
    nothing = {"exit": 0, "double": 0, "conflicting": 0, "conflicting_ids": []}
    for number, runs in enumerate(((base, later), (later, base))):
        found = merge(*runs, into=f"output/m{number}")
        assert found.json | nothing | expected == found.json
        last = records(Path(f"output/m{number}/results.jsonl"))[-1]
        assert text is None or last["text"] == text
        assert case != "two failures" or last["error"]["message"] == "later"


def test_within_a_run_its_newest_record_counts(base_and_later: tuple[Path, Path]) -> None:
    base, _ = base_and_later
    line = records(base / "results.jsonl")[0]
    failure(line)
    with (base / "results.jsonl").open("a") as log:
        log.write(json.dumps(line) + "\n")
    assert reported(merge(base), "exit", "ok", "failed") == (3, 9, 1)


def test_more_runs_than_a_process_may_open_files_at_first() -> None:
    prepare(60)
    shards = " ".join(map(str, run_shards(20)))
    command = f"ulimit -Sn 40; {sys.executable} -m batchkit merge {shards} --into {MERGED} --json"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", command], env=environ, capture_output=True, check=True)
    assert json.loads(done.stdout)["ok"] == 60
