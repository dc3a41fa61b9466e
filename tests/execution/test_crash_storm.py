"""A hundred kills at random instants lose no row and answer none twice."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random
from subprocess import DEVNULL

import pytest

from batchkit.storage.log import RESULTS
from tests.support.forks import LightFork
from tests.support.own_process import batchkit
from tests.support.rows import read_jsonl
from tests.support.storm import Blow, answers_by_row, kill_often

N_ROWS = 40_000
N_KILLS = 100
JOB = """
name = "storm"
input.path = "in.jsonl"
prompt.user = "{{ q }}"
output.keep = ["q"]

[engine]
kind = "dry-run"
options = { latency_s = 0.02 }

[run]
checkpoint_interval_s = 0.01
"""
SLOW = "run.max_in_flight=48"  # 2,400 rows a second at best: the storm must end before the run
FAST = "run.max_in_flight=1000"


@pytest.mark.timeout(280)
def test_hundred_kills_lose_no_row_and_answer_none_twice(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(
        "".join(f'{{"q":"question {n}"}}\n' for n in range(N_ROWS)), encoding="utf-8"
    )
    (tmp_path / "job.toml").write_text(JOB, encoding="utf-8")
    run = tmp_path / "output" / "storm"
    log = run / RESULTS

    random = Random(20261121)
    blows = [Blow(random.uniform(0.0, 0.15), awaits_record=n % 5 < 3) for n in range(N_KILLS)]
    with (tmp_path / "stderr").open("w") as stderr:
        slow = [sys.executable, "-m", "batchkit", "run", "job.toml", "--set", SLOW]
        storm = kill_often(
            lambda: LightFork(slow, cwd=tmp_path, stdout=DEVNULL, stderr=stderr), log, blows
        )
    assert storm.ended_by_itself is None, (tmp_path / "stderr").read_text()[-2000:]
    assert storm.kills == N_KILLS
    assert storm.kills_after_progress >= N_KILLS // 2
    assert storm.lines == sorted(storm.lines)  # what was finished stays finished
    assert 0 < storm.lines[-1] < N_ROWS
    ended = batchkit("run", "job.toml", "--set", FAST, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr

    found = batchkit("verify", run, "--json", cwd=tmp_path)
    assert found.returncode == 0, found.stdout
    expected = {
        "rows": N_ROWS,
        "records": N_ROWS,
        "ok": N_ROWS,
        "failed": 0,
        "pending": 0,
        "lost": 0,
        "duplicates": 0,
        "checkpoint_matches": True,
        "torn_bytes": 0,
    }
    assert json.loads(found.stdout) | expected == json.loads(found.stdout)
    exported = tmp_path / "all.jsonl"
    assert batchkit("export", run, "--jsonl", exported, cwd=tmp_path).returncode == 0
    assert answers_by_row(log) == answers_by_row(exported) == dict.fromkeys(range(N_ROWS), 1)
    for index, record in enumerate(read_jsonl(exported)):  # each row its own answer, in order
        assert record["fields"] == {"q": f"question {index}"}
        assert record["text"] == f"dry-run: no model answered row {index}"
    torn = len(list(run.glob("*.torn-*")))
    print(
        f"{storm.kills} kills, {storm.kills_after_progress} of them after progress;"
        f" {storm.lines[-1]:,} rows done by then; {torn} torn tails"
    )
