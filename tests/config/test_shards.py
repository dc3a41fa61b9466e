"""``run --shard``: static shares of the rows, each with a run folder of its own."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from batchkit.config.shard import Shard, asked_for, parse_shard
from batchkit.config.tables import InputTable
from batchkit.errors import JobError
from batchkit.execution.processor import ProductionBatchProcessor
from batchkit.sources import count_rows, read_rows
from tests.support.command_line import batchkit
from tests.support.dry_runs import (
    job,
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


def shares(count: int, **keys: Any) -> list[set[int]]:
    """The rows of each shard of ``in.jsonl``; no row is in two of them."""
    tables = [InputTable(path="in.jsonl", shard=f"{n}/{count}", **keys) for n in range(count)]
    found = [{row.index for row in read_rows(table)} for table in tables]
    assert [len(share) for share in found] == [*map(count_rows, tables)]
    assert len(set().union(*found)) == sum(map(len, found))
    return found


# Which rows


@pytest.mark.parametrize(("rows", "count"), [(200, 3), (2, 5)])
@pytest.mark.parametrize("keys", [{}, {"id": "key"}], ids=str)
def test_shards_share_all_rows_between_them(keys: Any, rows: int, count: int) -> None:
    write_rows(rows)
    assert set().union(*shares(count, **keys)) == set(range(rows))


@pytest.mark.parametrize("count", [2, 3, 7, 16])
@pytest.mark.parametrize("form", ["{}", "q{}", "{:08d}", "http://host/{}.png", "ä{}"])
def test_shares_are_even(count: int, form: str) -> None:
    names = [form.format(row) for row in range(1000 * count)]
    for number in (0, count - 1):
        size = sum(map(Shard(number, count).holds, names))
        assert 900 < size < 1100


def test_share_of_a_row_never_changes() -> None:
    """Runs that were begun with an earlier version must find their rows again."""
    shares = [next(n for n in range(4) if Shard(n, 4).holds(str(row))) for row in range(12)]
    assert shares == [1, 2, 0, 1, 2, 0, 0, 2, 2, 1, 0, 2]


def test_rows_with_ids_keep_their_shard_wherever_they_stand() -> None:
    rows = write_rows(60)
    table = InputTable(path="in.jsonl", id="key", shard="1/3")
    before = {row.id for row in read_rows(table)}
    random.Random(1).shuffle(rows)
    write_rows(rows)
    assert {row.id for row in read_rows(table)} == before
    assert 10 < len(before) == count_rows(table) < 30


def test_shard_is_a_share_of_the_rows_within_the_limit_and_the_filter() -> None:
    write_rows([{"q": "x", "kind": "odd" if n % 2 else "even"} for n in range(80)])
    odd = {"where": {"kind": "odd"}}
    assert shares(2, limit=40) == [{row for row in share if row < 40} for share in shares(2)]
    assert set().union(*shares(2, **odd)) == set(range(1, 80, 2))
    assert set().union(*shares(2, **odd, limit=10)) == set(range(1, 20, 2))


def test_row_that_cannot_be_read_is_in_one_shard() -> None:
    rows = [json.dumps({"key": f"k{n}", "q": "x"}) for n in range(20)]
    rows[7], rows[8] = "{broken", '{"q": "no id"}'
    Path("in.jsonl").write_text("\n".join(rows) + "\n")
    assert set().union(*shares(3, id="key")) == set(range(20))


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
    assert run("--shard", "0/3").json["skipped"] == len(mine)
    with (shard(0, 3) / "starts.jsonl").open("a") as starts:
        starts.write('{"run":{"total":null}}\n')
    assert status(shard(0, 3))["total"] == len(mine), "counted anew"


def test_retry_failed_stays_within_the_shard() -> None:
    write_rows([{"q": "x"} if n % 4 else {"other": "x"} for n in range(80)])
    write_job(prompt={"user": "{{ q }}"})
    first = run("--shard", "0/2")
    bad = {row for row in rows_of(0, 2) if row % 4 == 0}
    assert (first.exit_code, first.json["failed"]) == (3, len(bad))
    again = batchkit("retry-failed", str(shard(0, 2)), "--set", "prompt.user=fine", "--json")
    assert again.json | {"rows": len(bad), "recovered": len(bad), "exit": 0} == again.json
    assert verify(shard(0, 2)) | {"failed": 0, "pending": 0} == verify(shard(0, 2))


def test_folder_of_a_shard_cannot_become_that_of_another() -> None:
    prepare(50)
    run("--shard", "0/2")
    manifest_file = shard(0, 2) / "manifest.json"
    assert manifest(shard(0, 2))["identity"]["job"]["input.shard"] == "0/2"
    shard(0, 2).rename(shard(1, 2))
    found = run("--shard", "1/2")
    assert found.exit_code == 2
    assert 'input.shard: "0/2" → "1/2"' in found.stderr
    shard(1, 2).rename("output/a")
    found = run()
    assert found.exit_code == 2
    assert 'input.shard: "0/2" → null' in found.stderr
    assert not manifest_file.exists()


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
    processor = ProductionBatchProcessor(job(input={"shard": "0/2"}), quiet=True)
    with pytest.raises(JobError, match=r"input\.shard"):
        processor.process(["a", "b"])


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
        ("0/0", "must be at least 1"),
        ("٣/4", "write I/N"),
    ],
)
def test_what_is_no_shard_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_shard(text)


def test_shard_is_written_in_one_way_and_refused_by_its_key() -> None:
    assert InputTable(shard=" 01/4").shard == str(parse_shard("1/4")) == "1/4"
    prepare(3)
    for args, named in (
        (("--shard=4/4",), "--shard"),
        (("--set", "input.shard=4/4"), "input.shard: "),
    ):
        assert named in run(*args).refused()
    assert not Path("output").exists()


SLURM = {"SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_COUNT": "4"}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, "2/4"),
        ({"MIN": "0", "STEP": "1"}, "2/4"),
        ({"MIN": "1"}, "1/4"),
        ({"ID": "13", "COUNT": "5", "MIN": "1", "STEP": "4"}, "3/5"),
        ({"COUNT": None}, "auto: SLURM_ARRAY_TASK_COUNT not set"),
        ({"ID": None, "COUNT": None}, "SLURM_ARRAY_TASK_ID and SLURM_ARRAY_TASK_COUNT not set"),
        ({"ID": "x"}, "SLURM_ARRAY_TASK_ID=x, SLURM_ARRAY_TASK_COUNT=4"),
        ({"ID": "7"}, "SLURM_ARRAY_TASK_ID=7, SLURM_ARRAY_TASK_COUNT=4"),
        ({"MIN": "3"}, "SLURM_ARRAY_TASK_MIN=3, "),
        ({"STEP": "4"}, "SLURM_ARRAY_TASK_STEP=4 is not a task of"),
        ({"COUNT": "0"}, "SLURM_ARRAY_TASK_COUNT=0, "),
    ],
)
def test_auto_is_the_task_of_a_slurm_array(changes: dict[str, str | None], found: str) -> None:
    environ = SLURM | {f"SLURM_ARRAY_TASK_{name}": value for name, value in changes.items()}
    given = {name: value for name, value in environ.items() if value is not None}
    if "/" in found:
        assert str(asked_for("auto", given)) == found
        return
    with pytest.raises(JobError, match="--shard auto") as caught:
        asked_for("auto", given)
    assert found in str(caught.value)


def test_auto_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(20)
    assert "SLURM_ARRAY_TASK_ID" in run("--shard", "auto").stderr
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert run("--shard", "auto").exit_code == 0
    assert shard(2, 4).is_dir()
