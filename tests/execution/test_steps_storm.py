"""SIGKILL in the middle of rows with several generations: each generation is recorded once, and every
answer is that of an undisturbed run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from random import Random
from subprocess import DEVNULL
from typing import Any

import pytest
import tomlkit

from batchkit.storage.log import RESULTS, STEPS
from tests.support.forks import Fork, LightFork
from tests.support.own_process import batchkit
from tests.support.rows import read_jsonl, write_jsonl
from tests.support.several import CALLS, SOLVE, THREE, calls, each_once
from tests.support.small_vllm import SMALL
from tests.support.storm import Blow, kill_often, kill_once

N_ROWS = 3_000
N_KILLS = 24
N_KILLS_VLLM = int(os.environ.get("STORM_KILLS", "4"))  # of each kind
N_ROWS_VLLM = 24 * (N_KILLS_VLLM + 1)  # work for each start, and for the last
KINDS = pytest.mark.parametrize("kind", CALLS)
DRY: dict[str, Any] = {"engine": {"kind": "dry-run", "options": {"latency_s": 0.02}}}
SLOW = "run.max_in_flight=48"  # 2,400 generations a second at best: the storm ends before the run


@KINDS
@pytest.mark.timeout(200)
def test_kills_lose_no_generation_and_repeat_none(kind: str, tmp_path: Path) -> None:
    _prepare(tmp_path, kind, DRY, N_ROWS)
    run = tmp_path / "output/storm"
    random = Random(20261123)
    blows = [Blow(random.uniform(0.0, 0.15), awaits_record=n % 5 < 3) for n in range(N_KILLS)]
    before = b""

    def start() -> LightFork:
        nonlocal before
        before = _kept(before, run)
        slow = [sys.executable, "-m", "batchkit", "run", "job.toml", "--set", SLOW]
        return LightFork(slow, cwd=tmp_path, stdout=DEVNULL, stderr=DEVNULL)

    storm = kill_often(start, run / STEPS, blows)
    assert storm.ended_by_itself is None
    assert storm.kills_after_progress >= N_KILLS // 2
    _finish(tmp_path, _kept(before, run), kind, N_ROWS)
    print(f"{storm.kills} kills, {storm.lines[-1]:,} generations by then")


@KINDS
def test_kills_on_vllm_change_no_answer(kind: str, tmp_path: Path, text_model: Path) -> None:
    options = {name: SMALL[name] for name in SMALL if name != "limit_mm_per_prompt"}
    engine = {"model": str(text_model), "options": options | {"max_num_seqs": 8}}
    _prepare(tmp_path, kind, {"engine": engine, "sampling": {"max_tokens": 24}}, N_ROWS_VLLM)
    run = tmp_path / "output/storm"
    random = Random(20261123)
    done_at_kill = [0]
    before = b""
    for number in range(N_KILLS_VLLM):
        # After the first generations of this start, or its first record, which comes late.
        awaited, most_s = (run / RESULTS, 0.02) if number % 4 == 3 else (run / STEPS, 0.4)
        kill_once(tmp_path, awaited, random.uniform(0, most_s))
        before = _kept(before, run)
        done_at_kill.append(before.count(b"\n"))
    assert done_at_kill == sorted({*done_at_kill}), "a start got no further"
    assert done_at_kill[-1] < N_ROWS_VLLM * len(CALLS[kind]), f"the run had ended: {done_at_kill}"
    _finish(tmp_path, before, kind, N_ROWS_VLLM, start=Fork)

    undisturbed = batchkit("run", "job.toml", "--set", "name=calm", cwd=tmp_path, start=Fork)
    assert undisturbed.returncode == 0, undisturbed.stderr
    assert calls(tmp_path / "output/calm") == each_once(kind, N_ROWS_VLLM)
    assert _answers(tmp_path, "storm") == _answers(tmp_path, "calm")
    print(f"{N_KILLS_VLLM} kills; generations on disk after each: {done_at_kill[1:]}")


def _prepare(folder: Path, kind: str, tables: dict[str, Any], n_rows: int) -> None:
    job: dict[str, Any] = {
        "name": "storm",
        "input": {"path": "in.jsonl"},
        "run": {"checkpoint_interval_s": 0.1},
        **tables,
    }
    job |= {"steps": THREE} if kind == "steps" else {"rollout": {"function": "solve.py:solve"}}
    write_jsonl(folder / "in.jsonl", [{"q": f"question {n}"} for n in range(n_rows)])
    (folder / "solve.py").write_text(SOLVE)
    (folder / "job.toml").write_text(tomlkit.dumps(job))


def _kept(before: bytes, run: Path) -> bytes:
    """The ledger after a kill, without a torn tail: all that was in it must still be there."""
    path = run / STEPS
    now = path.read_bytes() if path.exists() else b""
    assert now.startswith(before)
    return now[: now.rfind(b"\n") + 1]


def _finish(
    folder: Path, before: bytes, kind: str, n_rows: int, start: type[Any] = LightFork
) -> None:
    """The last start: it asks for what is missing, and for nothing else."""
    run = folder / "output/storm"
    ended = batchkit("run", "job.toml", cwd=folder, start=start)
    assert ended.returncode == 0, ended.stderr
    assert (run / STEPS).read_bytes().startswith(before)
    assert calls(run) == each_once(kind, n_rows)
    found = json.loads(batchkit("verify", run, "--json", cwd=folder).stdout)
    assert found["ok"] == found["rows"] == found["records"] == n_rows
    assert found["lost"] == found["duplicates"] == found["torn_bytes"] == 0
    assert all(record["generations"] == len(CALLS[kind]) for record in read_jsonl(run / RESULTS))


def _answers(folder: Path, name: str) -> list[dict[str, Any]]:
    """Of rows and of generations, in an order that does not depend on time."""
    keys = ("index", "status", "text", "finish_reason", "usage", "input_hash", "steps")
    parts = ("index", "step", "call", "status", "request_hash", "text", "finish_reason", "usage")
    run = folder / "output" / name
    rows = [{key: line.get(key) for key in keys} for line in read_jsonl(run / RESULTS)]
    asked = [{key: line.get(key) for key in parts} for line in read_jsonl(run / STEPS)]
    in_order = sorted(asked, key=lambda line: (line["index"], line["step"], line["call"]))
    return sorted(rows, key=lambda row: int(row["index"])) + in_order
