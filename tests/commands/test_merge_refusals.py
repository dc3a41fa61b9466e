"""Runs that are not merged: other jobs, other inputs, a target that is there, damage."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from batchkit.config.shard import Shard
from batchkit.storage.identity import CHANGING
from batchkit.storage.runfolder import claim
from tests.support.chat_server import MODEL, serving
from tests.support.command_line import batchkit
from tests.support.dry_runs import finished, manifest, prepare, run, shard, write_job, write_rows
from tests.support.merges import MERGED, files, merge, run_shards

pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.slow]


@pytest.mark.parametrize("override", ["input.where.key=k1", "run.seed=7"])
def test_runs_of_different_jobs_are_refused_with_a_diff(override: str) -> None:
    """Which edits make another job is in tests/execution/test_changed_job.py."""
    finished(10)
    run("--set", "name=b", "--set", override)
    before = files()
    refused = merge("output/a", "output/b", partial=True).refused()
    assert "output/b" in refused
    assert f"{override.partition('=')[0].removesuffix('.key')}: " in refused
    assert files() == before


def test_runs_over_different_inputs_are_refused() -> None:
    rows = write_rows(20)
    write_job(input={"id": "key"})
    run_shards(2)
    write_rows(21)
    found = merge(shard(0, 2), shard(1, 2))
    assert (found.exit_code, MERGED.exists()) == (2, False)
    assert "input changed since" in found.stderr
    write_rows(rows[::-1])
    run("--shard", "1/2", "--fresh")
    found = merge(shard(0, 2), shard(1, 2))
    assert (found.exit_code, MERGED.exists()) == (2, False)
    assert "in.jsonl: " in found.stderr


def served_shards(*models: str) -> list[Path]:
    """A shard of each model, run in this order; the one of "" has no rows."""
    prepare(2)
    of = next(n for n in range(3, 99) if not any(map(Shard(0, n).holds, "01")))
    full = [number for number in range(of) if any(map(Shard(number, of).holds, "01"))]
    shards = []
    for model in models:
        number = full.pop() if model else 0
        with serving(model={"root": f"/models/{model}"}) as server:
            write_job(engine={"kind": "openai-server", "model": MODEL, "base_url": server.url})
            assert run("--shard", f"{number}/{of}").exit_code == 0
        shards.append(shard(number, of))
    return shards


def test_shards_of_two_models_are_refused_also_after_one_without_rows() -> None:
    found = merge(*served_shards("", "a", "b"), partial=True)
    assert (found.exit_code, MERGED.exists()) == (2, False)
    assert "engine.served: " in found.stderr


def test_merged_run_knows_what_its_parts_have_found() -> None:
    shards = served_shards("a", "a", "")
    assert merge(*shards).exit_code == 0
    known = manifest(shards[0])["identity"]["found"]["engine.served"]
    assert "engine.served" not in manifest(shards[2])["identity"]["found"]
    assert manifest(MERGED)["identity"]["found"]["engine.served"] == known


@pytest.mark.parametrize("n_shards", [1, 2])
def test_shards_in_which_a_prompts_file_changed_are_refused(n_shards: int) -> None:
    """Also one alone: some of its rows were asked with one content, some with another."""
    Path("guide.txt").write_text("one")
    prepare(20, prompt={"texts": {"guide": "guide.txt"}})
    shards = run_shards(n_shards)
    for folder in shards:
        found = {"prompt.files": {"prompt.texts.guide": CHANGING}}
        with (folder / "starts.jsonl").open("a") as starts:
            starts.write(json.dumps({"run": {"found": found}}) + "\n")
    found = merge(*shards, partial=True)
    assert (found.exit_code, MERGED.exists()) == (2, False)
    assert 'prompt.files: {"prompt.texts.guide":"changing"}' in found.stderr


def test_run_at_work_is_refused() -> None:
    prepare(20)
    run("--shard", "0/2", "--set", "run.max_in_flight=3")  # speed alone makes no other job
    run("--shard", "1/2")
    shards = [shard(0, 2), shard(1, 2)]
    with claim(shards[1]):
        found = merge(*shards)
    assert (found.exit_code, MERGED.exists()) == (1, False)
    assert f"{shards[1]}: process {os.getpid()}" in found.stderr
    assert merge(*shards).exit_code == 0
    assert run("--shard", "1/2").exit_code == 0


def test_targets_that_are_refused_leave_everything_as_it_is() -> None:
    prepare(20)
    shards = run_shards(2)
    run("--set", "name=there")
    Path("output/empty").mkdir()
    Path("output/link").symlink_to("nowhere")
    before = files()
    is_there = "exists already, and merge never changes a folder; move it away"
    for target, words in {
        f"output/../{shards[1]}/": "is one of the runs",
        "output/there": is_there,
        "output/empty": is_there,
        "output/link": is_there,
        "output/my run": "name: ",
        "output/-x": "name: ",
        "output/ä": "name: ",
    }.items():
        found = merge(*shards, into=target)
        assert (found.exit_code, files()) == (2, before)
        assert words in found.stderr
    assert "is named twice" in merge(shards[0], shards[0]).stderr


def test_damaged_record_stops_the_merge_and_leaves_nothing() -> None:
    prepare(40)
    shards = run_shards(2)
    log = shards[0] / "results.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    lines[7] = lines[7].replace(b'"status"', b'"status')
    log.write_bytes(b"".join(lines))
    before = files()
    found = merge(*shards)
    assert (found.exit_code, files()) == (1, before)
    assert f"{log}: the record at byte" in found.stderr


def test_job_file_stands_for_no_run_while_there_are_only_shards() -> None:
    prepare(20)
    run_shards(2)
    run("--shard", "0/2", "--fresh")  # the earlier run of that shard is moved aside, and is no part
    found = batchkit("status", "job.toml")
    assert found.exit_code == 2
    folder = Path("output/a").resolve()
    assert "there is no run in this folder, but there are shards of the job" in found.stderr
    assert f"batchkit merge {folder}.shard-*-of-2 --into job.toml" in found.stderr
