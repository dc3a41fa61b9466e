"""The scores of merged runs: those that were found later come along."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchkit.commands.merge import merge as join
from batchkit.commands.score import score_run
from batchkit.config.shard import Shard
from tests.support.chat_server import serving
from tests.support.command_line import Ended, batchkit
from tests.support.dry_runs import manifest, run, write_job, write_rows
from tests.support.judge import Judge, judge_file, judge_of, judged
from tests.support.merges import MERGED, SCORING, merge, rewrite, run_shards
from tests.support.scored_runs import NUMBER, counted, job
from tests.support.scored_runs import run as run_scored

pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.slow]


def prepare_scored() -> None:
    write_rows(
        [
            {"key": f"k{n}", "q": "x", "a": f"model answered row {n % 4}", "kind": f"g{n % 2}"}
            for n in range(60)
        ]
    )
    write_job(input={"id": "key"}, scoring=SCORING)


def score(folder: str | Path, *args: str) -> dict[str, Any]:
    return batchkit("score", str(folder), "--json", *args).json


def report(folder: str | Path) -> Ended:
    return batchkit("report", str(folder), "--json")


def test_scores_that_were_found_later_come_along() -> None:
    prepare_scored()
    other = ["--set", 'scoring.scorers=["rouge-l"]']
    run()
    expected = score("output/a", *other)
    shards = run_shards(3)
    for folder in shards:
        score(folder, *other)
    merge(*shards)
    assert (MERGED / "scores.jsonl").read_bytes().count(b"\n") == 60
    found = report(MERGED)
    assert found.json | expected == found.json
    assert "with different settings" not in found.stderr
    lines = (MERGED / "scores.jsonl").read_text()
    assert batchkit("score", str(MERGED)).exit_code == 0
    assert (MERGED / "scores.jsonl").read_text() == lines


def test_scores_follow_the_record_that_counts() -> None:
    prepare_scored()
    run("--set", "name=base")
    run("--set", "name=later")
    rewrite(Path("output/later"), lambda record: record.update(text="model answered row 1"))
    batchkit("score", "output/later")
    merge("output/base", "output/later")
    assert report(MERGED).json["overall"] == report("output/later").json["overall"]
    assert report(MERGED).json["overall"] != report("output/base").json["overall"]


def test_runs_scored_in_several_ways_are_mixed_until_scored_again() -> None:
    prepare_scored()
    shards = run_shards(2)
    score(shards[0], "--set", 'scoring.scorers=["rouge-l"]')
    merge(*shards)
    assert manifest(MERGED)["scoring"] is None
    assert "with different settings" in report(MERGED).stderr
    score(MERGED)
    assert manifest(MERGED)["scoring"] is not None


def test_merged_run_has_the_scores_of_judges(tmp_path: Path) -> None:
    judge = Judge()
    with serving(judge) as server:
        shards = [
            run_scored(job(tmp_path, counted(8), scoring=NUMBER).of_shard(Shard(n, 2)))
            for n in range(2)
        ]
        judge_of(shards[0], judge_file(tmp_path, server))
        n_judged = judge.asked.total()
        join(shards, MERGED)
        overall = score_run(MERGED, say=lambda text: None).to_json()["overall"]
        assert (overall["n"], overall["judge"], overall["em"]) == (8, 50, 100)
        assert sum(score == 0.5 for score in judged(MERGED).values()) == n_judged
        judge_of(MERGED, judge_file(tmp_path, server))
    assert {*judged(MERGED).values()} == {0.5}
