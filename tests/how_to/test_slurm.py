"""The page's scripts in a real SLURM, whose nodes vanish with their disks while the runs are in a store."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from batchkit.storage.log import RESULTS
from batchkit.storage.store.objects import Objects
from batchkit.storage.store.ranges import RANGE
from batchkit.storage.store.seals import Chain
from tests.support.command_line import batchkit
from tests.support.dry_runs import write_job
from tests.support.how_to import run_page
from tests.support.object_servers import object_server
from tests.support.paths import ROOT
from tests.support.rows import write_jsonl
from tests.support.server_process import NotInstalledError
from tests.support.slurm import Cluster, slurm_cluster
from tests.support.waiting import until

pytestmark = [pytest.mark.release, pytest.mark.timeout(900)]

N_ROWS = 16 * RANGE
N_TASKS = 4
SLOW_S = 300  # on a busy machine


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Three nodes. The working directory is what they share, with the input; the job takes its time."""
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.chdir(shared)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    write_jsonl(Path("in.jsonl"), [{"id": f"r{n}", "q": f"question {n}"} for n in range(N_ROWS)])
    try:
        with slurm_cluster(3) as running:
            yield running
    except NotInstalledError as error:
        pytest.skip(f"no SLURM: {error}")


def job_in(store: str) -> None:
    write_job(
        input={"path": "in.jsonl", "id": "id"},
        engine={"kind": "dry-run", "options": {"latency_s": 0.1, "max_num_seqs": 8}},
        run={"max_in_flight": 8, "store_interval_s": 0.5},
        output={"store": store},
    )


def submit(cluster: Cluster, script: str) -> str:
    """Submit a script of the page, with fewer tasks. Return the array's number."""
    words = {"sbatch array.sh": "true", "--shard auto": "--shard auto --set output.dir=$TMPDIR"}
    run_page("slurm", Path(), replaced=words)
    options = ["--parsable", f"--array=0-{N_TASKS - 1}", "--open-mode=append"]
    return cluster.run("sbatch", *options, script).strip()


def node_of(cluster: Cluster, job: str, task: int) -> str:
    return cluster.tasks(job)[str(task)]["BatchHost"]


def joined_as(store: str, job: str, task: int) -> str:
    """Return the address of the run of a joined task, or "" if it has none yet."""
    found = re.search(r"joining the run in \S+ as (\S+)", output_of(job, task))
    return f"{store}/runs/a.joined/{found[1]}" if found else ""


def await_rows(address: Callable[[], str]) -> None:
    """Wait until a store has answers of a run."""
    until(lambda: address() and Chain(Objects(address())).catch_up().files.get(RESULTS), SLOW_S)


def await_end(cluster: Cluster, job: str, restarts: list[int]) -> None:
    """Wait until all tasks have ended well. ``restarts``: how often SLURM has started each again."""
    states = {"PENDING", "RUNNING", "COMPLETING", "COMPLETED"}

    def is_over() -> bool:
        tasks = cluster.tasks(job)
        for number, task in tasks.items():
            assert task["JobState"] in states, output_of(job, number)
        return all(task["JobState"] == "COMPLETED" for task in tasks.values())

    until(is_over, SLOW_S)
    tasks = cluster.tasks(job)
    assert [int(tasks[str(number)]["Restarts"]) for number in range(N_TASKS)] == restarts


def output_of(job: str, number: int | str) -> str:
    path = Path(f"slurm-{job}_{number}.out")
    return path.read_text() if path.exists() else ""


def check_run(run: str) -> None:
    """The run has each row once."""
    found = batchkit("verify", run, "--json").json
    assert found["ok"] == found["rows"] == found["records"] == N_ROWS


def test_an_array_of_joined_tasks_loses_nodes(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with object_server("moto", tmp_path) as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        job_in(f"{server.store}/runs")
        job = submit(cluster, "array.sh")
        for task in (0, 3):  # task 3 gets the node that came back
            await_rows(partial(joined_as, server.store, job, task))
            cluster.lose(lost := node_of(cluster, job, task))
            cluster.start(lost)
        await_end(cluster, job, restarts=[1, 0, 0, 1])
        check_run(f"{server.store}/runs/a")
    assert not Path("output").exists()  # all was on the nodes' disks


def test_an_array_of_shards_continues_on_other_disks(cluster: Cluster, tmp_path: Path) -> None:
    job_in(f"file://{tmp_path}/store")
    runs = [f"file://{tmp_path}/store/a.shard-{n}-of-{N_TASKS}" for n in range(N_TASKS)]
    job = submit(cluster, "shards.sh")
    for run in runs[:2]:
        await_rows(partial(str, run))
    cluster.run("scontrol", "requeue", f"{job}_1")  # as for a task with a higher priority
    cluster.lose(lost := node_of(cluster, job, 0))
    cluster.start(lost)
    await_end(cluster, job, restarts=[1, 1, 0, 0])
    for number in (0, 1):
        assert "restored" in output_of(job, number)
    assert '"exit": 143' in output_of(job, 1)
    merged = batchkit("merge", *runs, "--into", "merged", "--json").ok().json
    assert (merged["ok"], merged["double"], merged["conflicting"]) == (N_ROWS, 0, 0)
    check_run("merged")
    verified = [batchkit("verify", run, "--json").json for run in runs]
    assert sum(found["records"] for found in verified) == N_ROWS  # none was written again
