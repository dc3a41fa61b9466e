"""Workers that join and leave with the nodes of a Ray cluster (``workers.count = "auto"``)."""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from batchkit.runs.status import status
from batchkit.runs.verify import verify
from batchkit.storage.log import RESULTS
from batchkit.storage.runfolder import MANIFEST
from tests.support.faulty_runs import running
from tests.support.ray_head import CPUS, RayHead
from tests.support.rows import read_jsonl
from tests.support.waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.release]

N_ROWS = 12_000
# 320 rows/s of each worker.
JOB = """
name = "faulty"
input.path = "rows.jsonl"
prompt.user = "{{ q }}"
engine.kind = "dry-run"
engine.options = { latency_s = 0.2, max_num_seqs = 64 }
run.max_in_flight = 64
run.checkpoint_interval_s = 0.5
"""
ROWS = [{"q": f"row {n}"} for n in range(N_ROWS)]


@pytest.fixture
def settings(ray_head: RayHead) -> list[str]:
    """Settings for a worker on each node."""
    address = f"workers.ray_address={ray_head.address}"
    return ["workers.count=auto", address, "workers.gpus=0", f"workers.cpus={CPUS}"]


def workers(folder: Path) -> list[dict[str, Any]]:
    run = folder / "output/faulty"
    return [dict(worker) for worker in status(run).workers] if (run / MANIFEST).exists() else []


def until_in(process: subprocess.Popen[str], is_so: Callable[[], object]) -> None:
    """As ``until``, while the run of ``process`` goes on."""

    def is_so_in_a_run() -> object:
        assert process.poll() is None, process.communicate()
        time.sleep(0.2)  # reading the notes takes time from the run
        return is_so()

    until(is_so_in_a_run, within_s=150)


def moment(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()


def now() -> float:
    return datetime.now(UTC).timestamp()


def assert_each_row_once(folder: Path) -> None:
    indexes = Counter(record["index"] for record in read_jsonl(folder / "output/faulty" / RESULTS))
    assert indexes == dict.fromkeys(range(N_ROWS), 1)
    assert verify(folder / "output/faulty").is_sound


def kill(ray_head: RayHead, raylet: psutil.Process) -> None:
    for one in [raylet, *raylet.children(recursive=True)]:
        one.kill()


@pytest.mark.parametrize(("lose", "state"), [(kill, "node lost"), (RayHead.drain, "drained")])
def test_a_node_that_joins_gets_rows_and_its_rows_return_when_it_leaves(
    lose: Callable[[RayHead, psutil.Process], None],
    state: str,
    ray_head: RayHead,
    settings: Sequence[str],
    tmp_path: Path,
) -> None:
    with (
        ExitStack() as held,
        running(tmp_path, tmp_path, ROWS, {}, settings, job=JOB) as process,
    ):
        held.callback(process.kill)
        until_in(process, lambda: [one["rows"] > 0 for one in workers(tmp_path)] == [True])
        added = held.enter_context(ray_head.another_node(CPUS))
        until_in(process, lambda: [one["rows"] > 0 for one in workers(tmp_path)] == [True, True])
        lost_at = now()
        lose(ray_head, added)
        until_in(process, lambda: workers(tmp_path)[1]["left_at"])
        held.enter_context(ray_head.another_node(CPUS))
        until_in(process, lambda: [one["rows"] > 0 for one in workers(tmp_path)] == [True] * 3)
        _, stderr = process.communicate(timeout=250)
        assert process.returncode == 0, stderr
    assert_each_row_once(tmp_path)
    stayed, left, late = workers(tmp_path)
    assert (left["state"], left["restarts"]) == (state, 0)
    assert moment(left["left_at"]) - lost_at < 15
    assert stayed["left_at"] is late["left_at"] is None
    assert moment(stayed["joined_at"]) < moment(left["joined_at"]) < lost_at
    assert moment(late["joined_at"]) > lost_at
    assert stayed["rows"] + left["rows"] + late["rows"] == N_ROWS
    assert not added.is_running(), "a node that has drained is empty, so Ray ends it"


def test_rows_wait_for_workers_min_and_workers_max_is_not_exceeded(
    ray_head: RayHead, settings: Sequence[str], tmp_path: Path
) -> None:
    settings = [*settings, "workers.min=2", "workers.max=2"]
    with (
        ExitStack() as held,
        running(tmp_path, tmp_path, ROWS, {}, settings, job=JOB) as process,
    ):
        held.callback(process.kill)
        log = tmp_path / "output/faulty/run.log"
        until_in(process, lambda: log.exists() and "1 waits for resources" in log.read_text())
        assert "worker 0 is ready" in log.read_text()
        assert not read_jsonl(tmp_path / "output/faulty" / RESULTS)
        held.enter_context(ray_head.another_node(CPUS))
        held.enter_context(ray_head.another_node(CPUS))
        _, stderr = process.communicate(timeout=250)
        assert process.returncode == 0, stderr
    assert_each_row_once(tmp_path)
    both = workers(tmp_path)
    assert min(one["rows"] for one in both) > N_ROWS / 4
    assert len(both) == 2
