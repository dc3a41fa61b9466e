"""``--on-change requeue``, interrupted at any instant: no row is lost, mixed or answered twice."""

from __future__ import annotations

import errno
import math
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random
from subprocess import DEVNULL
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchkit.execution.processor import ProductionBatchProcessor
from batchkit.sources.rowhash import input_hash
from batchkit.storage.log import REQUEUE
from tests.support import embed_runs
from tests.support.command_line import batchkit
from tests.support.dry_runs import (
    LOG,
    READERS,
    RUN,
    job,
    prepare,
    records,
    run,
    settled,
    verify,
    write_job,
    write_rows,
)
from tests.support.forks import LightFork
from tests.support.rows import read_jsonl

pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.slow]


@pytest.mark.parametrize("undone", [False, True], ids=["carried on", "change undone"])
@pytest.mark.parametrize("stop_at", ["Path.mkdir", "Path.rename", "Path.replace", "shutil.rmtree"])
def test_requeue_killed_at_any_instant_mixes_no_rows_and_no_vectors(
    stop_at: str, undone: bool
) -> None:
    number, is_killed = 0, True
    while is_killed:
        number += 1
        shutil.rmtree("output", ignore_errors=True)
        embed_runs.prepare(12)
        run()
        rows = read_jsonl(Path("in.jsonl"))
        write_rows([{"key": "new", "q": "first"}, *rows[:10]])
        command = [sys.executable, "-m", "tests.support.killed_requeue", stop_at, str(number)]
        ended = LightFork(command, stdout=DEVNULL, stderr=DEVNULL).wait(timeout=60)
        is_killed = ended == -signal.SIGKILL
        if undone:
            write_rows(rows)
        found = run()
        while found.exit_code != 0:
            assert found.exit_code == 2, found.stderr  # refused: the change is to be named again
            found = run("--on-change", "requeue")
        now = read_jsonl(Path("in.jsonl"))
        newest = {r["index"]: (r["id"], r["input_hash"]) for r in records()}
        assert newest == {n: (row["key"], input_hash(row)) for n, row in enumerate(now)}
        assert len(newest) == len(records())
        sound = {"mixed": 0, "unknown": 0, "duplicates": 0, "bad_vectors": 0, "ok": len(now)}
        assert verify() | sound == verify()
        assert embed_runs.check() == list(range(len(now)))
        assert not list(RUN.glob(".requeue*"))
    assert number > 1


@pytest.mark.parametrize("seed", range(4))
def test_requeue_keeps_the_answers_of_unchanged_rows_that_share_an_id(seed: int) -> None:
    random = Random(seed)
    rows = [{"key": f"doc{n // 5}", "prompt": f"question {random.randrange(3)}"} for n in range(60)]
    tables: dict[str, Any] = {"input": {"id": "key"}, "output": {"keep": ["key", "prompt"]}}
    some = ProductionBatchProcessor(job(**tables, run={"sample": 30}), quiet=True).process(rows)
    answered = Counter(tuple(record["fields"].values()) for record in some.records())
    random.shuffle(rows)
    rows = [row if random.random() < 0.9 else row | {"prompt": "new"} for row in rows[3:]]
    again = ProductionBatchProcessor(job(**tables), quiet=True, on_change="requeue").process(rows)
    assert again.skipped == (answered & Counter(tuple(row.values()) for row in rows)).total()
    assert [record["fields"] for record in again.records()] == rows
    assert len(records()) == len(rows)


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ([math.nan, 1.5, None], [None, 1.5, math.nan]),
        ([{"b": 1, "a": 1}] * 2, [{"a": 1, "b": 1}] * 2),
    ],
    ids=["NaN is not null", "order of keys"],
)
def test_rows_that_are_almost_the_same_run_again(then: list[Any], now: list[Any]) -> None:
    def write(values: list[Any]) -> None:
        pq.write_table(pa.table({"q": pa.array(values)}), "in.parquet")

    write(then)
    write_job(input={"path": "in.parquet"})
    run()
    write(now)
    assert "2 rows to run again" in run("--on-change", "requeue").stderr
    assert verify()["mixed"] == 0


def test_requeue_needs_no_hard_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """exFAT, and many FUSE and network filesystems, have none."""

    def link(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    prepare(5)
    run()
    before = LOG.read_bytes()
    write_rows(6)
    monkeypatch.setattr(os, "link", link)
    assert run("--on-change", "requeue").exit_code == 0
    assert settled() == dict.fromkeys(range(6), "ok")
    assert (RUN / "results.jsonl.before-1").read_bytes() == before
    checkpoint = orjson.loads((RUN / "checkpoint.json").read_bytes())
    assert checkpoint["offset"] == LOG.stat().st_size


def test_nobody_reads_a_run_whose_requeue_was_interrupted() -> None:
    prepare(5)
    run()
    (RUN / REQUEUE).mkdir()
    for command in (*READERS[:-1], ["status"], ["verify"]):
        found = batchkit(*command)
        assert found.exit_code == 1
        assert "run the job again to finish it" in found.stderr


def test_planted_requeue_takes_nothing_from_another_run() -> None:
    prepare(5)
    run()
    run("--set", "name=b")
    (RUN / REQUEUE).symlink_to("../b")
    found = run()
    assert (found.exit_code, "is not the folder that a requeue makes" in found.stderr) == (1, True)
    assert len(records(Path("output/b/results.jsonl"))) == 5


def test_requeue_on_a_full_disk_leaves_the_run_as_it_was() -> None:
    prepare(300, input={"id": "key"})
    run()
    before = LOG.read_bytes()
    write_rows(299)
    script = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000));"
        "from batchkit.cli import cli; cli(['run', 'job.toml', '--on-change', 'requeue'])"
    )
    done = subprocess.run([sys.executable, "-B", "-c", script], capture_output=True, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "can't requeue, and the run is as it was" in done.stderr
    assert LOG.read_bytes() == before
    assert not list(RUN.glob(".requeue*"))
    assert run("--on-change", "requeue").exit_code == 0
    assert verify()["mixed"] == 0
