"""Steps on two models of real vLLM: one after another, killed in the middle; and together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from batchkit.runs.status import status
from batchkit.storage.log import RESULTS, STEPS
from tests.support.forks import Fork
from tests.support.own_process import batchkit, begin
from tests.support.rollouts import THREE, calls, each_once
from tests.support.rows import read_jsonl, write_jsonl
from tests.support.waiting import until

pytestmark = pytest.mark.vllm

N_ROWS = 40
OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 128 * 2**20,
    "worker_cls": "tests.support.failing_worker.FailingWorker",
}
OVER_4 = {"additional_config": {"over": 4}}  # more requests at a time run out of memory


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As ``text_model``, with other weights."""
    from batchkit.commands.demo_model import build_demo_model

    path = tmp_path_factory.mktemp("models") / "other"
    build_demo_model(path, text_only=True, seed=1)
    return path


@pytest.fixture
def job(tmp_path: Path, text_model: Path, other_model: Path, monkeypatch: Any) -> Path:
    """The folder of ``job.toml``."""
    write_jsonl(tmp_path / "in.jsonl", [{"q": f"question {n}"} for n in range(N_ROWS)])
    (tmp_path / "markers").mkdir()
    monkeypatch.setenv("BATCHKIT_TEST_FAULTS", json.dumps({"folder": str(tmp_path / "markers")}))
    draft, judge, revise = THREE
    table = {
        "name": "turns",
        "input": {"path": "in.jsonl"},
        "run": {"checkpoint_interval_s": 0.1},
        "sampling": {"max_tokens": 12},
        "engine": {"model": str(text_model), "options": OPTIONS},
        "engines": {"judge": {"model": str(other_model), "options": {**OPTIONS, **OVER_4}}},
        "steps": [draft, {**judge, "engine": "judge"}, revise],
    }
    (tmp_path / "job.toml").write_text(tomlkit.dumps(table))
    return tmp_path


def judged(run: Path) -> int:
    steps = run / STEPS
    return steps.read_bytes().count(b'"step":"judge"') if steps.exists() else 0


def answers(run: Path) -> list[Any]:
    lines = sorted(read_jsonl(run / STEPS), key=lambda line: (line["index"], line["step"]))
    records = sorted(read_jsonl(run / RESULTS), key=lambda record: int(record["index"]))
    return [(li["step"], li["text"]) for li in lines] + [
        (record["status"], record["text"]) for record in records
    ]


@pytest.mark.release
@pytest.mark.timeout(240)
def test_two_models_have_their_turns_through_a_kill_and_answer_as_they_do_together(
    job: Path,
) -> None:
    run = job / "output/turns"
    with begin("run", "job.toml", cwd=job, start=Fork) as process:
        until(lambda: judged(run) >= 8 or process.poll() is not None, within_s=120)
        process.kill()
    assert 8 <= judged(run) < N_ROWS
    assert calls(run).total() == N_ROWS + judged(run)
    ended = batchkit("run", "job.toml", cwd=job, start=Fork)
    assert ended.returncode == 0, ended.stderr
    assert calls(run) == each_once("steps", N_ROWS)
    log = (run / "run.log").read_text()
    assert log.count("next engine: [engines.judge]") == 1, "the second start begins with it"
    assert log.count("next engine: [engine];") == 1
    assert "engine judge: out of memory" in log
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["engines"]["judge"]["engine_steps"] == [{"max_num_seqs": 4}]
    assert manifest["engine_steps"] == []
    assert status(run).engine_settings == {"engines.judge.max_num_seqs": 4}
    assert "engine judge: engine settings remembered: {'max_num_seqs': 4}" in log
    restarts = [start.get("engine_restarts", 0) for start in manifest["starts"]]
    assert [n > 0 for n in restarts] == [True, False]
    assert "vllm" in manifest["starts"][-1]["engines"]["judge"]
    assert (run / "engine.judge.log").exists()

    fits = ["--set", "name=together", "--set", "run.worker_gpus=0"]
    together = batchkit("run", "job.toml", *fits, cwd=job, start=Fork)
    assert together.returncode == 0, together.stderr
    assert "engines are loaded together" in together.stderr
    assert "next engine: " not in together.stderr
    assert answers(job / "output/together") == answers(run)
