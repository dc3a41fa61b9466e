"""``workers.per_gpu``: several engines on one GPU. There is none here: vLLM computes on the CPU, which batchkit takes for
a GPU, and MPS is a stand-in that only runs."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from batchkit.config.tables import JobConfig
from batchkit.errors import JobError
from batchkit.execution.places import places_of
from batchkit.storage.log import RESULTS
from tests.support.faulty_runs import (
    Ended,
    assert_only_failed,
    ended_in,
    question_rows,
    running,
    wait_for_records,
)
from tests.support.mps_stand_in import daemons, has_ended, install
from tests.support.rows import read_jsonl
from tests.support.waiting import until

TWO = ["workers.per_gpu=2"]
# Files of ``failing_worker.py``, which only an engine imports: vLLM comes with it.
ENGINES, HOLD, SHOWN = "engines.txt", "hold", "shown.jsonl"


def job(**tables: Any) -> JobConfig:
    engine = {"model": "m", **tables.pop("engine", {})}
    return JobConfig(engine=engine, workers={"per_gpu": 2}, **tables)


def test_each_gpu_gets_engines_with_equal_parts_of_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,2")
    its = job(engine={"options": {"gpu_memory_utilization": 0.8}})
    places = places_of(its, [""], {})
    assert [place.id for place in places] == ["#1", "#2", "#3", "#4"]
    assert [place.environment["CUDA_VISIBLE_DEVICES"] for place in places] == ["5", "5", "2", "2"]
    assert {place.job_of(its).engine.options["gpu_memory_utilization"] for place in places} == {0.4}
    (default, *_) = places_of(job(), [""], {"": {"CUDA_VISIBLE_DEVICES": "7"}})
    assert default.environment == {"CUDA_VISIBLE_DEVICES": "7"}
    assert default.job_of(job()).engine.options == {"gpu_memory_utilization": 0.45}
    claims = {"kv_cache_memory_bytes": 2**20, "kv_offloading_size": 3}
    (of_claims, _) = places_of(job(), [""], {"": {"CUDA_VISIBLE_DEVICES": "7"}})
    parts = of_claims.job_of(job(engine={"options": claims})).engine.options
    assert parts | {"gpu_memory_utilization": None} == {
        "kv_cache_memory_bytes": 2**19,
        "kv_offloading_size": 1.5,
        "gpu_memory_utilization": None,
    }
    assert len(places_of(job(engine={"kind": "dry-run"}), [""], {})) == 1


@pytest.mark.parametrize(
    ("gpus", "engine", "words"),
    [
        (None, {}, "no GPU is visible"),
        ("", {}, "no GPU is visible"),
        ("0", {"options": {"tensor_parallel_size": 2}}, "2 GPUs"),
        ("0", {"in_process": True}, "engine.in_process"),
        ("0", {"kind": "transformers"}, "can't share a GPU"),
        ("0", {"kind": "openai-server", "base_url": "http://127.0.0.1:9/v1"}, "no model"),
    ],
)
def test_what_can_not_share_a_gpu_is_refused_with_the_reason(
    gpus: str | None, engine: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if gpus is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    with pytest.raises(JobError, match=r"^workers\.per_gpu") as refused:
        places_of(job(engine=engine), [""], {})
    assert words in str(refused.value)


def pids_of(folder: Path) -> list[int]:
    file = folder / "markers" / ENGINES
    return [int(line) for line in file.read_text().split()] if file.exists() else []


@pytest.mark.vllm
def test_an_engine_that_is_killed_is_restarted_while_the_other_works(
    tmp_path: Path, text_model: Path, calm: list[str]
) -> None:
    mps = install(tmp_path)
    shows = ["CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY"]
    faults = {"step_s": 0.1, "reload_s": 0, "shows": shows}
    with running(tmp_path, text_model, question_rows({}), faults, TWO, environment=mps) as process:
        wait_for_records(tmp_path, 4)
        (daemon,) = daemons(mps)
        log, pids = tmp_path / "output/faulty" / RESULTS, pids_of(tmp_path)
        assert len(pids) == 2
        hold = tmp_path / "markers" / HOLD
        hold.touch()
        os.kill(pids[0], signal.SIGKILL)
        run_log = tmp_path / "output/faulty/run.log"
        until(lambda: "engine died" in run_log.read_text())
        before = log.read_bytes().count(b"\n")
        # The other engine answers meanwhile.
        until(lambda: log.read_bytes().count(b"\n") >= before + 4)
        hold.unlink()
        ended = ended_in(tmp_path, process)
    assert_only_failed(ended, calm, {})
    assert len(pids_of(tmp_path)) == 3
    assert "engine 1 of 2: engine died" in ended.log or "engine 2 of 2: engine died" in ended.log
    assert "up to 16 requests run at the same time" in ended.log
    assert ended.manifest["starts"][-1]["engine_restarts"] == 1
    shown = {tuple(line.values()) for line in read_jsonl(tmp_path / "markers" / SHOWN)}
    ((gpu, pipes),) = shown
    assert (gpu, Path(pipes).name) == ("0", "pipe")
    assert has_ended(daemon)
    assert [*Path(mps["TMPDIR"]).iterdir()] == []


@pytest.mark.vllm
def test_without_mps_the_reason_is_said_once(
    tmp_path: Path, text_model: Path, calm: list[str]
) -> None:
    gpu = {"CUDA_VISIBLE_DEVICES": "0"}
    with running(tmp_path, text_model, question_rows({}), {}, TWO, environment=gpu) as process:
        ended: Ended = ended_in(tmp_path, process)
    assert_only_failed(ended, calm, {})
    assert ended.log.count("MPS can't run") == 1


N_KILLS = 10


@pytest.mark.release
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_storm_of_kills_loses_nothing(tmp_path: Path, text_model: Path, calm: list[str]) -> None:
    """Ten kills of an engine, of the run and of the daemon, in turn, each after two more records."""
    mps, rows = install(tmp_path), question_rows({}) * 10
    faults, log = {"step_s": 0.05, "reload_s": 0}, tmp_path / "output/faulty" / RESULTS

    def begun() -> Any:
        many = [*TWO, "run.max_engine_restarts=50"]
        return running(tmp_path, text_model, rows, faults, many, environment=mps)

    process = begun()
    for number in range(3 * N_KILLS):
        before = log.read_bytes().count(b"\n") if log.exists() else 0
        wait_for_records(tmp_path, before + 2)
        victim = ("engine", "run", "daemon")[number % 3]
        if victim == "engine":
            os.kill(pids_of(tmp_path)[-1], signal.SIGKILL)
        elif victim == "daemon":
            daemons(mps)[-1].kill()
        else:
            process.kill()
            process.wait(60)
            process = begun()
    with process:
        ended = ended_in(tmp_path, process)
    assert_only_failed(ended, calm * 10, {})
    assert [*Path(mps["TMPDIR"]).iterdir()] == []
