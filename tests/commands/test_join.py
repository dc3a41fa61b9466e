"""Machines that answer the rows of one job together (``run --join``), and share only a store."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from random import Random
from subprocess import Popen

import pytest
import tomlkit

from batchkit.storage.log import RESULTS
from batchkit.storage.store.ranges import RANGE
from tests.support.command_line import batchkit as in_process
from tests.support.dry_runs import write_job
from tests.support.forks import Fork
from tests.support.own_process import batchkit, begin
from tests.support.rows import read_jsonl, write_jsonl
from tests.support.small_vllm import SMALL
from tests.support.waiting import until

pytestmark = pytest.mark.slow

N_ROWS = 6 * RANGE + 7
SLOW = ["--set", "run.max_in_flight=8"]
STORM_ROWS = int(os.environ.get("JOIN_ROWS", "20000"))
STORM_MACHINES = int(os.environ.get("JOIN_MACHINES", "6"))
STORM_KILLS = int(os.environ.get("JOIN_KILLS", "12"))
INTERVAL_S = float(os.environ.get("JOIN_INTERVAL_S", "0.2"))
STORM_LATENCY_S = float(os.environ.get("JOIN_LATENCY_S", "0.01"))
STORM_PERIOD_S = float(os.environ.get("JOIN_PERIOD_S", "1.2"))
VLLM_KILLS = int(os.environ.get("JOIN_VLLM_KILLS", "3"))


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of all machines' working directories; a job that takes 20 ms a row."""
    prepare(tmp_path, monkeypatch, N_ROWS)
    return tmp_path


def prepare(
    folder: Path, monkeypatch: pytest.MonkeyPatch, n_rows: int, latency_s: float = 0.01
) -> None:
    job = folder / "job"
    job.mkdir()
    monkeypatch.chdir(job)
    write_jsonl(job / "in.jsonl", [{"id": f"r{n}", "q": f"question {n}"} for n in range(n_rows)])
    write_job(
        input={"path": "in.jsonl", "id": "id"},
        engine={"kind": "dry-run", "options": {"latency_s": latency_s, "max_num_seqs": 8}},
        run={"store_interval_s": INTERVAL_S},
        output={"store": f"file://{folder}/store"},
    )


def machine(folder: Path, name: str) -> Path:
    shutil.copytree(folder / "job", folder / name)
    return folder / name


def join(here: Path, *settings: str) -> Popen[str]:
    return begin("run", "job.toml", "--join", *settings, cwd=here)


def check_merged(folder: Path, n_rows: int) -> None:
    """The merged run is in the store, with each row once."""
    here = machine(folder, "reader")
    ended = batchkit("run", "job.toml", cwd=here)
    assert json.loads(ended.stdout)["skipped"] == n_rows, ended.stderr
    found = json.loads(batchkit("verify", "output/a", "--json", cwd=here).stdout)
    assert found["ok"] == found["rows"] == found["records"] == n_rows
    for record in read_jsonl(here / "output/a" / RESULTS):
        assert record["text"] == f"dry-run: no model answered row {record['index']}"


def test_machines_share_the_rows(machines: Path) -> None:
    joined = [join(machine(machines, f"machine{n}")) for n in range(3)]
    ended = [(one.communicate(timeout=120), one.returncode) for one in joined]
    assert [code for _, code in ended] == [0, 0, 0], ended
    check_merged(machines, N_ROWS)
    runs = [run for run in (machines / "store/a.joined").glob("*-*") if (run / "seals").exists()]
    assert len(runs) == 3
    for run in runs:  # each has answered some
        assert any("-none-" not in segment.name for segment in (run / "segments").iterdir())


def test_a_machine_takes_ranges_when_it_needs_them(machines: Path) -> None:
    with join(machine(machines, "slow"), "--set", "run.max_in_flight=1") as process:
        until(lambda: any((machines / "store").glob("a.joined/*/segments/*-0-*")))
        taken = [path.name for path in (machines / "store/a.joined/ranges").iterdir()]
        process.kill()
    assert len(taken) <= 3  # one is at work, the others are read ahead


def test_rows_of_a_machine_that_vanished_are_answered_by_others(machines: Path) -> None:
    first = machine(machines, "first")
    with join(first, *SLOW) as process:
        until(lambda: any((machines / "store").glob("a.joined/*/segments/*-0-*")))
        process.kill()
    shutil.rmtree(first)
    second = batchkit("run", "job.toml", "--join", cwd=machine(machines, "second"))
    assert second.returncode == 0, second.stderr
    check_merged(machines, N_ROWS)


def test_a_machine_that_comes_late_finds_the_merged_run(machines: Path) -> None:
    assert in_process("run", "job.toml", "--join").exit_code == 0
    late = batchkit("run", "job.toml", "--join", cwd=machine(machines, "late"))
    assert late.returncode == 0
    assert "all rows are done, and merged" in late.stderr
    assert json.loads(late.stdout)["skipped"] == N_ROWS


def test_join_needs_a_store(machines: Path) -> None:
    write_job()
    ended = in_process("run", "job.toml", "--join")
    assert ended.exit_code == 2
    assert "--join needs output.store" in ended.stderr


@pytest.mark.release
@pytest.mark.timeout(1800)
def test_machines_that_are_killed_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the machines at a time vanish with their disks, and new ones join."""
    prepare(tmp_path, monkeypatch, STORM_ROWS, STORM_LATENCY_S)
    random, names = Random(20261130), iter(range(10**6))

    def new() -> tuple[Path, Popen[str]]:
        here = machine(tmp_path, f"machine{next(names)}")
        return here, join(here)

    at_work = [new() for _ in range(STORM_MACHINES)]
    killed = 0
    while killed < STORM_KILLS:
        time.sleep(random.uniform(0.5, 1.5) * STORM_PERIOD_S)
        for here, process in random.sample(at_work, STORM_MACHINES // 2):
            at_work.remove((here, process))
            assert process.poll() is None, process.communicate()[1]
            process.kill()
            process.wait()
            shutil.rmtree(here)
            killed += 1
            at_work.append(new())
    for _, process in at_work:
        _, stderr = process.communicate(timeout=1200)
        assert process.returncode == 0, stderr
    check_merged(tmp_path, STORM_ROWS)


@pytest.mark.vllm
@pytest.mark.release
@pytest.mark.timeout(1800)
def test_vllm_on_three_machines_that_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text_model: Path
) -> None:
    n_rows, random, names = (2 + 2 * VLLM_KILLS) * RANGE, Random(20261130), iter(range(10**6))
    options = {name: value for name, value in SMALL.items() if name != "limit_mm_per_prompt"}
    prepare(tmp_path, monkeypatch, n_rows)
    tables = tomlkit.loads(Path("job.toml").read_text())
    tables["engine"] = {"model": str(text_model), "options": {**options, "max_num_seqs": 8}}
    tables["sampling"] = {"max_tokens": 24}
    Path("job.toml").write_text(tomlkit.dumps(tables))

    def new() -> tuple[Path, Popen[str]]:
        here = machine(tmp_path, f"machine{next(names)}")
        return here, begin("run", "job.toml", "--join", cwd=here, start=Fork)

    at_work = [new() for _ in range(3)]
    for _ in range(VLLM_KILLS):
        time.sleep(random.uniform(1, 6))
        here, process = at_work.pop(0)
        assert process.poll() is None, process.communicate()[1]
        process.kill()
        process.wait()
        shutil.rmtree(here)
        at_work.append(new())
    for _, process in at_work:
        _, stderr = process.communicate(timeout=1200)
        assert process.returncode == 0, stderr
    here = machine(tmp_path, "calm")
    for name in ("a", "calm"):
        ended = batchkit("run", "job.toml", "--set", f"name={name}", cwd=here, start=Fork)
        assert ended.returncode == 0, ended.stderr
        assert json.loads(ended.stdout)["skipped"] == (n_rows if name == "a" else 0)
    stormy, calm = (
        {one["index"]: one["text"] for one in read_jsonl(here / "output" / name / RESULTS)}
        for name in ("a", "calm")
    )
    assert stormy == calm
