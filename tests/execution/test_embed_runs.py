"""Embed runs that are killed, resumed, requeued, merged and repaired: each row has its own vector, once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import numpy as np
import pytest

from batchkit.storage.ledger import Ledger
from batchkit.storage.vectors import segment_path
from tests.support.command_line import batchkit
from tests.support.dry_runs import LOG, RUN, records, run, shard, verify
from tests.support.embed_runs import check, prepare, stored, write_job
from tests.support.forks import LightFork
from tests.support.merges import MERGED, merge, run_shards
from tests.support.records import with_vector
from tests.support.rows import read_jsonl, write_jsonl

pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.slow]


def rows() -> list[dict[str, str]]:
    return read_jsonl(Path("in.jsonl"))


# Kills


def test_interrupted_run_keeps_every_vector_that_was_made() -> None:
    """Also those that would have waited for others, to share an fsync."""
    prepare(400, engine={"options": {"latency_s": 0.05}}, run={"max_in_flight": 20})
    command = [sys.executable, "-m", "batchkit", "run", "job.toml"]
    started = LightFork(command, stdout=subprocess.PIPE, stderr=DEVNULL, text=True)
    while not LOG.exists() or LOG.stat().st_size == 0:
        assert started.poll() is None
    started.send_signal(signal.SIGINT)
    said = json.loads(started.communicate()[0])
    assert started.returncode == 130
    assert 0 < said["ok"] == len(check()) < 400
    assert run().exit_code == 0
    assert check() == list(range(400))


# Lost files


def all_segments() -> None:
    shutil.rmtree(RUN / "vectors")


def one_segment() -> None:
    segment_path(RUN, 0).unlink()


def end_of_segment() -> None:
    os.truncate(segment_path(RUN, 0), 300)


@pytest.mark.parametrize("lose", [all_segments, one_segment, end_of_segment])
@pytest.mark.parametrize("is_checked", [True, False], ids=["checkpoint", "no checkpoint"])
def test_rows_whose_vector_was_lost_run_again(lose: Any, is_checked: bool) -> None:
    prepare(20)
    run("--limit", "15")
    lose()
    if not is_checked:
        (RUN / "checkpoint.json").unlink()  # as if none had been written yet
    found = run()
    assert (found.exit_code, "vectors/000000.arrow" in found.stderr) == (0, True)
    assert "0 records kept; left out: 15 records; old log: " in found.stderr
    assert check() == list(range(20))
    assert batchkit("verify").exit_code == 0


# Failures and changes


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_requeue_keeps_the_vectors_of_unchanged_rows(dtype: str) -> None:
    prepare(10, output={"vector_dtype": dtype})
    assert run().exit_code == 0
    before = segment_path(RUN, 0).read_bytes()
    was = rows()
    now = [{"key": "new", "q": "first"}, was[9], *was[1:5], {"key": "k6", "q": "changed"}]
    write_jsonl(Path("in.jsonl"), now)
    done = run("--on-change", "requeue")
    assert (done.exit_code, done.json["skipped"]) == (0, 5)
    assert check() == list(range(7))
    assert (
        segment_path(RUN, 0).read_bytes() == before
    )  # the old log, which is kept, names its vectors
    places = {one["index"]: one["embedding"]["segment"] for one in records()}
    assert [places[row] for row in range(7)] == [2, 1, 1, 1, 1, 1, 2]
    assert verify()["bad_vectors"] == 0


def test_requeue_copies_no_vector_whose_row_stays_where_it_was() -> None:
    prepare(10)
    assert run().exit_code == 0
    write_jsonl(Path("in.jsonl"), [*rows(), {"key": "k10", "q": "last"}])
    assert run("--on-change", "requeue").exit_code == 0
    assert check() == list(range(11))
    assert [one["embedding"]["segment"] for one in records()] == [0] * 10 + [1]


def test_requeue_of_a_run_whose_vectors_are_gone_leaves_it_as_it_was() -> None:
    prepare(10)
    assert run().exit_code == 0
    before = LOG.read_bytes()
    shutil.rmtree(RUN / "vectors")
    write_jsonl(Path("in.jsonl"), rows()[5:])
    done = run("--on-change", "requeue")
    assert done.exit_code == 1
    assert "; the run is unchanged" in done.stderr
    assert "000000.arrow: is missing" in done.stderr
    assert LOG.read_bytes() == before


def test_another_type_of_vectors_is_a_changed_job() -> None:
    prepare(3)
    assert run().exit_code == 0
    write_job(output={"vector_dtype": "float16"})
    done = run()
    assert done.exit_code == 2
    assert "output.vector_dtype" in done.stderr
    assert run("--on-change", "requeue").exit_code == 0
    assert {vector.dtype for vector in stored().values()} == {np.dtype("float16")}
    assert check() == [0, 1, 2]


# Shards and their merge


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_merged_shards_have_the_vectors_of_one_run(dtype: str) -> None:
    prepare(50, failing=(7, 30), output={"vector_dtype": dtype})
    found = merge(*run_shards(3))
    assert (found.json["ok"], found.json["failed"]) == (48, 2)
    answered = [row for row in range(50) if row not in (7, 30)]
    assert check(MERGED) == answered
    places = [one["embedding"] for one in records(MERGED / "results.jsonl") if "embedding" in one]
    assert [place["row"] for place in places] == list(range(48))  # in the order of the input
    assert {vector.dtype.name for vector in stored(MERGED).values()} == {dtype}
    assert verify(MERGED)["bad_vectors"] == 0
    assert merge(MERGED, into="output/again").json["ok"] == 48
    assert check(Path("output/again")) == answered


def test_merge_of_a_run_that_lost_a_vector_is_refused() -> None:
    prepare(20)
    shards = run_shards(2)
    segment_path(shards[1], 0).unlink()
    done = merge(*shards)
    assert done.exit_code == 1
    assert f"{shards[1]}/vectors/000000.arrow: is missing" in done.stderr
    assert not MERGED.exists()


def test_merge_of_vectors_of_two_models_is_refused() -> None:
    """A server may have another one than before under the same name."""
    prepare(4)
    shards = run_shards(2)
    for row in range(4):
        ledger = Ledger(shards[1])
        ledger.write([with_vector(row, 5)])
        ledger.close()
    segment_path(shards[1], 0).unlink()
    done = merge(*shards)
    assert done.exit_code == 2
    assert (
        f"{shard(1, 2)}: has vectors with float32 of 5 dimensions, but {shard(0, 2)} has vectors with float32"
        " of 8 dimensions"
    ) in done.stderr
    assert not MERGED.exists()


# Damage


def test_verify_finds_vectors_that_are_not_there_and_repair_sets_their_records_aside() -> None:
    prepare(10, failing=(3,))
    assert run("--limit", "6").exit_code == 3
    assert run().exit_code == 3
    segment_path(RUN, 1).unlink()
    audit = batchkit("verify", str(RUN), "--json")
    assert audit.exit_code == 1
    assert (audit.json["bad_vectors"], audit.json["bad_vector_rows"]) == (4, [6, 7, 8, 9])
    assert "vectors/000001.arrow: is missing; the record of row 6" in audit.json["vector_fault"]
    assert "bad_vectors: 4 (rows 6, 7, 8, 9)" in batchkit("verify", str(RUN)).stdout
    repaired = batchkit("verify", "--repair", str(RUN))
    assert "6 records kept; left out: 4 records" in repaired.stderr
    assert verify()["bad_vectors"] == 0
    assert run().exit_code == 3
    assert check() == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert verify()["duplicates"] == 0


def test_file_that_cannot_be_read_is_no_reason_to_set_records_aside() -> None:
    prepare(10)
    assert run().exit_code == 0
    segment = segment_path(RUN, 0)
    segment.rename("aside")
    segment.symlink_to(segment.name)  # as after a lost mount, or without permission
    log = LOG.read_bytes()
    for options in ([], ["--repair"]):
        refused = batchkit("verify", *options, str(RUN))
        assert refused.exit_code == 1
        assert "vectors/000000.arrow: can't be read" in refused.stderr
    assert LOG.read_bytes() == log
    segment.unlink()
    Path("aside").rename(segment)
    assert verify()["bad_vectors"] == 0


def test_repair_keeps_the_older_answer_whose_vector_is_there() -> None:
    prepare(3)
    assert run().exit_code == 0
    line = next(raw for raw in LOG.read_bytes().splitlines(keepends=True) if b'"index":1,' in raw)
    with LOG.open("ab") as file:
        file.write(line.replace(b'"segment":0', b'"segment":7'))
    assert verify()["bad_vector_rows"] == [1]
    assert "left out: 1 records" in batchkit("verify", "--repair", str(RUN)).stderr
    assert check() == [0, 1, 2]
