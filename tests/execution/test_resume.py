"""A run carries on where it stopped, with the job and the input it began with; or with what a requeue kept of it.

The dry-run engine stands in for a model wherever only the counting matters.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from itertools import product
from pathlib import Path
from random import Random
from subprocess import DEVNULL
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchkit.errors import ChangedError
from batchkit.execution.processor import ProductionBatchProcessor
from batchkit.sources.rowhash import input_hash
from batchkit.storage.log import REQUEUE
from tests.support import embed_runs, rollouts
from tests.support.command_line import batchkit
from tests.support.dry_runs import (
    LOG,
    READERS,
    RUN,
    job,
    manifest,
    prepare,
    process,
    records,
    run,
    settled,
    verify,
    write_job,
    write_rows,
)
from tests.support.forks import LightFork
from tests.support.full_disk import full_disk
from tests.support.rows import read_jsonl

pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.slow]


def test_resume_runs_only_what_is_missing() -> None:
    prepare()
    first = run("--limit", "4")
    before = LOG.read_bytes()
    second = run()
    assert (first.exit_code, second.exit_code) == (0, 0)
    assert LOG.read_bytes().startswith(before)
    assert settled() == dict.fromkeys(range(10), "ok")
    expected = {"total": 10, "ok": 10, "failed": 0, "skipped": 4, "exit": 0}
    assert second.json | expected == second.json
    assert "resumed 4" in second.stderr


def test_torn_run_is_recovered_and_finished() -> None:
    prepare()
    run()
    lines = LOG.read_bytes().splitlines(keepends=True)
    LOG.write_bytes(b"".join(lines[:3]) + lines[3][:50])
    (RUN / "checkpoint.json").unlink()  # a killed run has none that is ahead of its log
    found = run()
    assert "broken bytes" in found.stderr
    assert found.json["skipped"] == 3
    assert settled() == dict.fromkeys(range(10), "ok")
    assert (RUN / "results.jsonl.torn-1").read_bytes() == lines[3][:50]
    assert verify()["checkpoint_matches"]


def test_nothing_left_starts_no_engine() -> None:
    prepare()
    run()
    before = LOG.read_bytes()
    again = run()
    assert (again.exit_code, again.json["ok"], again.json["skipped"]) == (0, 10, 10)
    assert "nothing left to run" in again.stderr
    assert "loading" not in again.stderr
    assert "engine" not in manifest()["starts"][-1]
    assert LOG.read_bytes() == before


def test_nothing_left_still_says_that_rows_failed() -> None:
    write_rows([{"q": "x"}, {"other": "x"}])
    write_job()
    assert [run().exit_code, run().exit_code] == [3, 3]
    assert len(records()) == 2


def test_limit_smaller_than_what_is_done_runs_nothing() -> None:
    prepare()
    run()
    found = run("--limit", "3")
    assert (found.exit_code, len(records())) == (0, 10)
    assert "the first 3 rows have records; start without input.limit" in found.stderr
    assert found.json["total"] >= found.json["ok"]


def test_filter_keeps_the_index_of_the_unfiltered_input() -> None:
    write_rows([{"q": str(n), "kind": "odd" if n % 2 else "even"} for n in range(10)])
    write_job(input={"where": {"kind": "odd"}})
    found = run("--limit", "2")
    assert (found.json["total"], sorted(settled())) == (2, [1, 3])
    found = run()
    assert (found.json["total"], found.json["skipped"]) == (5, 2)
    assert sorted(settled()) == [1, 3, 5, 7, 9]
    both = 'input.where={kind=["odd", "even"]}'
    assert run("--set", both).exit_code == 2, "a table that mixes two filters is not one table"
    found = run("--set", both, "--on-change", "requeue")
    assert (found.json["total"], found.json["skipped"]) == (10, 5)
    assert sorted(settled()) == list(range(10))
    found = run("--on-change", "requeue")
    assert (found.json["total"], found.json["ok"]) == (5, 5)


Rows = list[dict[str, Any]]
KEY: dict[str, Any] = {"id": "key"}
TEN: Rows = [{"key": f"k{n}", "q": f"question {n}"} for n in range(10)]
THERE: Rows = [{"key": n, "q": f"other {n}" if n < 3 else "same"} for n in range(5)]
HERE: Rows = [{"key": n, "q": f"this {n}" if n < 3 else "same"} for n in range(5)]
SHIFTED: Rows = [{"key": n, "other": n + 3, "q": f"row {n}"} for n in range(5)]
TWINS: Rows = [{"key": "twin", "q": "x"}, {"key": "twin", "q": "y"}]
C, FAILS = {"key": "c", "q": "x"}, {"key": "twin", "other": "x"}
KINDS: Rows = [{"key": "twin", "kind": kind, "q": kind} for kind in "ab"]


@pytest.mark.parametrize(
    ("there", "its_input", "here", "own_input", "run_here"),
    [
        pytest.param(TEN[:6], KEY, TEN, KEY, [6, 7, 8, 9], id="by id"),
        pytest.param([C, FAILS], {}, [C, FAILS], {}, [1], id="failed there"),
        # A row without an id of one field is named by its place, where another row may be.
        pytest.param(THERE, {}, HERE, {}, [0, 1, 2], id="nobody has ids"),
        pytest.param(THERE, {}, HERE, KEY, [0, 1, 2], id="only this run has"),
        pytest.param(THERE, KEY, HERE, {}, [0, 1, 2], id="only the other has"),
        pytest.param(SHIFTED, KEY, SHIFTED, {"id": "other"}, [0, 1, 2, 3, 4], id="of another field"),
        # Rows that share an id: one failed there, one came here, one was not reached, or filtered.
        pytest.param(
            [TWINS[0], FAILS, C], KEY, [TWINS[0], FAILS, C, {**C, "q": "y"}], KEY, [1, 3], id="twins"
        ),
        pytest.param([TWINS[1], C], KEY, [*TWINS, {**C, "q": "edited"}], KEY, [0], id="a later twin"),
        pytest.param([C], KEY, [C, C], KEY, [1], id="an answer counts for one row"),
        pytest.param(
            KINDS, KEY | {"where": {"kind": "a"}}, KINDS, KEY | {"where": {"kind": "b"}}, [1],
            id="a twin that the filter leaves out",
        ),
    ],
)  # fmt: skip
def test_skip_from_skips_the_rows_that_the_other_run_answered_and_no_others(
    there: Rows,
    its_input: dict[str, Any],
    here: Rows,
    own_input: dict[str, Any],
    run_here: list[int],
) -> None:
    write_rows(there)
    write_job(input=its_input)
    run("--set", "name=other")
    write_rows(here)
    write_job(input=own_input)
    found = run("--skip-from", "output/other")
    assert sorted(settled()) == run_here
    assert found.json["total"] == found.json["skipped"] + len(run_here)


def test_row_of_an_iterator_is_not_skipped_for_a_later_one_with_its_id() -> None:
    """There, only the later one was answered before the run ended."""
    rows = [{"key": "twin", "q": "x"}, {"key": "twin", "q": "y"}, {"key": "c", "q": "z"}]
    by_key = job(input={"id": "key"}, prompt={"user": "{{ q }}"})
    other = ProductionBatchProcessor(by_key, quiet=True).process(iter(rows[1:]), name="other")
    skipping = ProductionBatchProcessor(by_key, quiet=True, skip_from=other.folder)
    skipping.process(iter(rows))
    assert settled() == {0: "ok"}


# From Python


def test_list_of_prompts_resumes_like_a_file() -> None:
    prompts = [f"prompt {n}" for n in range(5)]
    assert process(prompts).ok == 5
    again = process(prompts)
    assert (again.skipped, again.total, len(list(again.records()))) == (5, 5, 5)
    with pytest.raises(ChangedError, match="rows from Python"):
        process([*prompts, "one more"])
    assert process([*prompts, "one more"], on_change="requeue").ok == 6
    assert len(records()) == 6


def test_iterator_begins_a_new_run_each_time() -> None:
    assert process(iter(["a", "b"])).ok == 2
    assert process(iter(["a", "c"])).skipped == 0
    assert len(records()) == len(records(Path("output/a.1/results.jsonl"))) == 2


@pytest.mark.parametrize("value", [2**70, "a\ud800", {"a\ud800": 1}, {(1, 2): 3}], ids=ascii)
def test_field_that_json_has_no_word_for_does_not_stop_the_run(value: Any) -> None:
    summary = process([{"prompt": "hi", "odd": value}, {"prompt": "hi"}])
    assert summary.ok + summary.failed == 2
    assert settled()[1] == "ok"


def test_rows_before_a_broken_place_are_answered_once_and_the_run_can_be_carried_on() -> None:
    good = "".join(f"{n}\n" for n in range(40))
    Path("rows.csv").write_text(f'q\n{good}"open\n\n')
    write_job(
        input={"path": "rows.csv"},
        run={"max_in_flight": 16},
        engine={"kind": "dry-run", "options": {"latency_s": 0.05}},
    )
    found = run()
    assert found.exit_code == 1
    assert len(settled()) == 40, "what was in flight is paid for"
    assert run().exit_code == 1
    assert len(records()) == 40
    Path("rows.csv").write_text(f"q\n{good}last\n")
    assert run("--on-change", "requeue").exit_code == 0
    assert len(settled()) == 41


def answer_some(kind: str) -> None:
    if kind == "vectors":
        embed_runs.prepare(12)
    else:
        write_rows(12)
        rollouts.write(None, 0, steps=rollouts.THREE, input={"path": "in.jsonl", "id": "key"})
    run()


@pytest.mark.parametrize(
    ("kind", "stop_at"),
    [
        *product(["vectors"], ["Path.mkdir", "Path.rename", "Path.replace", "shutil.rmtree"]),
        *product(["generations"], ["Path.rename", "Path.replace"]),
    ],
)
def test_requeue_killed_at_any_instant_mixes_no_rows_no_vectors_and_no_generations(
    kind: str, stop_at: str
) -> None:
    """The run is then carried on, with vectors also after the change of the input was undone."""
    answer_some(kind)
    rows = read_jsonl(Path("in.jsonl"))
    changed = [{"key": "new", "q": "first"}, *rows[:10]]
    copy("output", "answered")
    number, is_killed = 0, True
    while is_killed:
        number += 1
        copy("answered", "output")
        write_rows(changed)
        command = [sys.executable, "-m", "tests.support.killed", stop_at, str(number)]
        ended = LightFork(command, stdout=DEVNULL, stderr=DEVNULL).wait(timeout=60)
        is_killed = ended == -signal.SIGKILL
        copy("output", "killed")
        for now in [changed, rows] if kind == "vectors" else [changed]:
            copy("killed", "output")
            write_rows(now)
            found = run()
            while found.exit_code != 0:
                assert found.exit_code == 2, found.stderr  # refused: name the change again
                found = run("--on-change", "requeue")
            assert_nothing_is_mixed(kind, now)
    assert number > 1


def copy(folder: str, to: str) -> None:
    """In place of what is there; hard links stay links."""
    shutil.rmtree(to, ignore_errors=True)
    subprocess.run(["cp", "-a", folder, to], check=True)


def assert_nothing_is_mixed(kind: str, rows: Rows) -> None:
    newest = {r["index"]: (r["id"], r["input_hash"]) for r in records()}
    assert newest == {n: (row["key"], input_hash(row)) for n, row in enumerate(rows)}
    assert len(newest) == len(records())
    sound = {"mixed": 0, "unknown": 0, "duplicates": 0, "bad_vectors": 0, "ok": len(rows)}
    ended = batchkit("verify", str(RUN), "--json").ok()
    assert ended.json | sound == ended.json
    if kind == "vectors":
        assert embed_runs.check() == list(range(len(rows)))
    else:
        assert rollouts.calls(RUN) == rollouts.each_once("steps", len(rows))
        named = {(line["index"], line["id"]) for line in rollouts.generations()}
        assert named == {(n, row["key"]) for n, row in enumerate(rows)}
    assert not list(RUN.glob(".requeue*"))


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
        assert "to finish it, run the job again" in found.stderr


def test_planted_requeue_takes_nothing_from_another_run() -> None:
    prepare(5)
    run()
    run("--set", "name=b")
    (RUN / REQUEUE).symlink_to("../b")
    found = run()
    assert (found.exit_code, "must be a folder made by a requeue" in found.stderr) == (1, True)
    assert len(records(Path("output/b/results.jsonl"))) == 5


def test_requeue_on_a_full_disk_leaves_the_run_as_it_was() -> None:
    prepare(300, input={"id": "key"})
    run()
    before = LOG.read_bytes()
    write_rows(299)
    with full_disk(30_000):
        done = run("--on-change", "requeue")
    assert "the run is unchanged" in done.refused(1)
    assert "Traceback" not in done.stderr
    assert LOG.read_bytes() == before
    assert not list(RUN.glob(".requeue*"))
    assert run("--on-change", "requeue").exit_code == 0
    assert verify()["mixed"] == 0
