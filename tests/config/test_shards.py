"""``run --shard``: static shares of the rows, each with a run folder of its own.

The dry-run engine stands in for a model: only the counting matters.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from batchkit.cli import cli
from batchkit.config.loading import make_job
from batchkit.config.shard import Shard, asked_for, parse_shard
from batchkit.config.tables import InputTable
from batchkit.errors import JobError
from batchkit.execution.processor import ProductionBatchProcessor
from batchkit.sources import count_rows, read_rows
from tests.support.command_line import batchkit
from tests.support.dry_runs import (
    manifest,
    prepare,
    run,
    settled,
    shard,
    status,
    verify,
    write_job,
    write_rows,
)

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def rows_of(number: int, count: int) -> set[int]:
    return set(settled(shard(number, count) / "results.jsonl"))


def run_shards(count: int, *args: str) -> list[set[int]]:
    """The rows of each shard, run one after the other."""
    for number in range(count):
        assert run("--shard", f"{number}/{count}", *args).exit_code == 0
    return [rows_of(number, count) for number in range(count)]


# Which rows


@pytest.mark.parametrize("with_ids", [False, True])
def test_shards_share_all_rows_between_them(with_ids: bool) -> None:
    prepare(200, input={"id": "key"} if with_ids else {})
    shares = run_shards(3)
    assert sum(map(len, shares)) == 200
    assert set().union(*shares) == set(range(200))


@pytest.mark.parametrize("count", [2, 3, 7, 16])
@pytest.mark.parametrize("form", ["{}", "q{}", "{:08d}", "http://host/{}.png", "ä{}"])
def test_shares_are_even(count: int, form: str) -> None:
    names = [form.format(row) for row in range(4000 * count)]
    for number in (0, count - 1):
        size = sum(map(Shard(number, count).holds, names))
        assert 0.94 * 4000 < size < 1.06 * 4000


def test_share_of_a_row_never_changes() -> None:
    """Runs that were begun with an earlier version must find their rows again."""
    shares = [next(n for n in range(4) if Shard(n, 4).holds(str(row))) for row in range(12)]
    assert shares == [1, 2, 0, 1, 2, 0, 0, 2, 2, 1, 0, 2]


def test_rows_with_ids_keep_their_shard_wherever_they_stand() -> None:
    rows = write_rows(60)
    before = ids_in(InputTable(path="in.jsonl", id="key", shard="1/3"))
    random.Random(1).shuffle(rows)
    write_rows(rows)
    assert ids_in(InputTable(path="in.jsonl", id="key", shard="1/3")) == before
    assert 10 < len(before) < 30


def ids_in(table: InputTable) -> set[str]:
    rows = [row.id for row in read_rows(table)]
    assert len(rows) == count_rows(table)
    return set(rows)


def test_shard_is_a_share_of_the_rows_within_the_limit() -> None:
    prepare(100)
    whole = run_shards(2)
    first = [{row for row in share if row < 40} for share in whole]
    assert run_shards(2, "--limit", "40", "--fresh") == first
    assert run("--shard", "0/2").json["skipped"] == len(first[0]), "a larger limit carries on"
    assert rows_of(0, 2) == whole[0]


def test_shard_is_a_share_of_the_rows_that_the_filter_keeps() -> None:
    write_rows([{"key": f"k{n}", "q": "x", "kind": "odd" if n % 2 else "even"} for n in range(80)])
    write_job(input={"where": {"kind": "odd"}})
    odd = set(range(1, 80, 2))
    assert set().union(*run_shards(2)) == odd
    limited = run_shards(2, "--limit", "10", "--fresh")
    assert set().union(*limited) == set(range(1, 20, 2))


def test_row_that_cannot_be_read_is_in_one_shard() -> None:
    rows = [json.dumps({"key": f"k{n}", "q": "x"}) for n in range(20)]
    rows[7], rows[8] = "{broken", '{"q": "no id"}'
    Path("in.jsonl").write_text("\n".join(rows) + "\n")
    write_job(input={"id": "key"})
    found = [run("--shard", f"{number}/3").json for number in range(3)]
    assert sum(shard["ok"] for shard in found) == 18
    assert sum(shard["failed"] for shard in found) == 2


def test_more_shards_than_rows() -> None:
    prepare(2)
    assert sum(map(len, run_shards(5))) == 2
    assert all(verify(shard(number, 5))["pending"] == 0 for number in range(5))


# Each is a run like any other


def test_counts_are_those_of_the_shard() -> None:
    prepare(100)
    mine = {row.index for row in read_rows(InputTable(path="in.jsonl", shard="0/3"))}
    found = run("--shard", "0/3").json
    assert found | {"name": "a.shard-0-of-3", "total": len(mine), "ok": len(mine)} == found
    for counts in (status(shard(0, 3)), verify(shard(0, 3))):
        assert (counts["ok"], counts["pending"]) == (len(mine), 0)
    assert status(shard(0, 3))["total"] == verify(shard(0, 3))["rows"] == len(mine)
    assert not Path("output/a").exists()


def test_total_is_counted_anew_where_the_manifest_has_none() -> None:
    prepare(100)
    run("--shard", "0/3")
    path = shard(0, 3) / "manifest.json"
    n_rows = manifest(shard(0, 3))["total"]
    path.write_text(json.dumps(manifest(shard(0, 3)) | {"total": None}))
    assert status(shard(0, 3))["total"] == n_rows


@pytest.mark.parametrize("with_ids", [False, True])
def test_shard_carries_on_where_it_stopped(with_ids: bool) -> None:
    prepare(100, input={"id": "key"} if with_ids else {})
    run("--shard", "1/2")
    log = shard(1, 2) / "results.jsonl"
    whole = settled(log)
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:5]) + lines[5][:40])
    (shard(1, 2) / "checkpoint.json").unlink()  # a killed run has none that is ahead of its log
    found = run("--shard", "1/2")
    assert (found.exit_code, found.json["skipped"], found.json["total"]) == (0, 5, len(whole))
    assert settled(log) == whole


def test_retry_failed_stays_within_the_shard() -> None:
    write_rows([{"q": "x"} if n % 4 else {"other": "x"} for n in range(80)])
    write_job(prompt={"user": "{{ q }}"})
    first = run("--shard", "0/2")
    bad = {row for row in rows_of(0, 2) if row % 4 == 0}
    assert (first.exit_code, first.json["failed"]) == (3, len(bad))
    again = batchkit("retry-failed", str(shard(0, 2)), "--set", "prompt.user=fine", "--json")
    assert again.json | {"rows": len(bad), "recovered": len(bad), "exit": 0} == again.json
    assert verify(shard(0, 2)) | {"failed": 0, "pending": 0} == verify(shard(0, 2))


def test_score_reads_the_rows_of_the_shard_alone() -> None:
    write_rows(
        [{"key": f"k{n}", "q": "x", "a": "dry-run: no model answered row 1"} for n in range(60)]
    )
    write_job(input={"id": "key"}, scoring={"extract": "text", "reference": "a", "scorers": ["em"]})
    run("--shard", "0/2")
    n_rows = len(rows_of(0, 2))
    found = batchkit("score", str(shard(0, 2)), "--json")
    assert (found.exit_code, found.json["total"], found.json["scored"]) == (0, n_rows, n_rows)


def test_folder_of_a_shard_cannot_become_that_of_another() -> None:
    prepare(50)
    run("--shard", "0/2")
    manifest_file = shard(0, 2) / "manifest.json"
    assert manifest(shard(0, 2))["identity"]["input.shard"] == "0/2"
    shard(0, 2).rename(shard(1, 2))
    found = run("--shard", "1/2")
    assert found.exit_code == 2
    assert 'input.shard: "0/2" → "1/2"' in found.stderr
    shard(1, 2).rename("output/a")
    found = run()
    assert found.exit_code == 2
    assert 'input.shard: "0/2" → null' in found.stderr
    assert not manifest_file.exists()


def test_shard_can_be_moved_aside() -> None:
    prepare(10)
    run("--shard", "0/2")
    assert run("--shard", "0/2", "--fresh").exit_code == 0
    assert Path("output/a.shard-0-of-2.1").is_dir()


def test_folder_of_a_shard_grows_into_the_whole_run_on_demand() -> None:
    prepare(50)
    run("--shard", "0/2")
    n_rows = len(rows_of(0, 2))
    shard(0, 2).rename("output/a")
    found = run("--on-change", "requeue")
    assert (found.exit_code, found.json["skipped"], found.json["ok"]) == (0, n_rows, 50)


def test_dry_run_and_validate_show_the_shard() -> None:
    prepare(40)
    first = [row.index for row in read_rows(InputTable(path="in.jsonl", shard="1/2"))]
    shown = run("--shard", "1/2", "--dry-run").stdout
    assert [f"--- row {index} " in shown for index in first[:3]] == [True] * 3
    assert shown.count("--- row") == 3
    found = batchkit("validate", "job.toml", "--set", "input.shard=1/2", "--json")
    assert found.json["rows"] == len(first)


def test_rows_from_python_have_no_shard() -> None:
    job = make_job({"engine": {"kind": "dry-run"}, "input": {"shard": "0/2"}}, "the test")
    with pytest.raises(JobError, match=r"input\.shard"):
        ProductionBatchProcessor(job, quiet=True).process(["a", "b"])


def test_processor_runs_the_shard_that_its_job_names() -> None:
    prepare(30)
    job = make_job(
        {
            "name": "a",
            "input": {"path": "in.jsonl"},
            "prompt": {"user": "{{ q }}"},
            "engine": {"kind": "dry-run"},
        },
        "the test",
    )
    found = [
        ProductionBatchProcessor(job.of_shard(Shard(n, 2)), quiet=True).process() for n in (0, 1)
    ]
    assert sum(summary.ok for summary in found) == 30
    assert [Path(summary.folder).name for summary in found] == ["a.shard-0-of-2", "a.shard-1-of-2"]


# What names a shard


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("4/4", "the first of 4 is 0/4, the last 3/4"),
        ("-1/4", "write I/N"),
        ("1", "write I/N"),
        ("1/", "write I/N"),
        ("1/2/3", "write I/N"),
        ("a/b", "write I/N"),
        ("", "write I/N"),
        ("1.0/4", "write I/N"),
        ("0/0", "one at least"),
        ("٣/4", "write I/N"),
    ],
)
def test_what_is_no_shard_is_refused(text: str, words: str) -> None:
    prepare(3)
    found = run(f"--shard={text}")
    assert found.exit_code == 2
    assert words in found.stderr
    assert "--shard" in found.stderr
    assert not Path("output").exists()
    found = run("--set", f"input.shard={text!r}")
    assert found.exit_code == 2
    assert "input.shard: " in found.stderr


def test_shard_is_written_in_one_way() -> None:
    assert InputTable(shard=" 01/4").shard == str(parse_shard("1/4")) == "1/4"


SLURM = {"SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_COUNT": "4"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (SLURM, "2/4"),
        (SLURM | {"SLURM_ARRAY_TASK_MIN": "0", "SLURM_ARRAY_TASK_STEP": "1"}, "2/4"),
        (SLURM | {"SLURM_ARRAY_TASK_MIN": "1"}, "1/4"),
        (
            {
                "SLURM_ARRAY_TASK_ID": "13",
                "SLURM_ARRAY_TASK_COUNT": "5",
                "SLURM_ARRAY_TASK_MIN": "1",
                "SLURM_ARRAY_TASK_STEP": "4",
            },
            "3/5",
        ),
    ],
)
def test_auto_is_the_task_of_a_slurm_array(environ: dict[str, str], expected: str) -> None:
    assert str(asked_for("auto", environ)) == expected


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, "SLURM_ARRAY_TASK_ID and SLURM_ARRAY_TASK_COUNT not set"),
        ({"SLURM_ARRAY_TASK_ID": "1"}, "auto: SLURM_ARRAY_TASK_COUNT not set"),
        (SLURM | {"SLURM_ARRAY_TASK_ID": "x"}, "SLURM_ARRAY_TASK_ID=x, SLURM_ARRAY_TASK_COUNT=4"),
        (SLURM | {"SLURM_ARRAY_TASK_ID": "7"}, "SLURM_ARRAY_TASK_ID=7, SLURM_ARRAY_TASK_COUNT=4"),
        (SLURM | {"SLURM_ARRAY_TASK_MIN": "3"}, "SLURM_ARRAY_TASK_MIN=3, "),
        (SLURM | {"SLURM_ARRAY_TASK_STEP": "4"}, "SLURM_ARRAY_TASK_STEP=4 is no task of"),
        (SLURM | {"SLURM_ARRAY_TASK_COUNT": "0"}, "SLURM_ARRAY_TASK_COUNT=0, "),
    ],
)
def test_auto_outside_of_a_regular_array_names_the_variables(
    environ: dict[str, str], words: str
) -> None:
    with pytest.raises(JobError, match="--shard auto") as caught:
        asked_for("auto", environ)
    assert words in str(caught.value)


def test_auto_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(20)
    assert "SLURM_ARRAY_TASK_ID" in run("--shard", "auto").stderr
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert run("--shard", "auto").exit_code == 0
    assert shard(2, 4).is_dir()


def test_help_describes_shards() -> None:
    options: list[Any] = [p.opts[0] for p in cli.commands["run"].params]
    assert "--shard" in options
