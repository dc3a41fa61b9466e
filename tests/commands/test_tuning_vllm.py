"""find-bs with real vLLM, its worker made to run out of memory where a GPU would."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomlkit

from tests.support.forks import Fork
from tests.support.jobs import with_tables
from tests.support.own_process import batchkit
from tests.support.rows import write_jsonl
from tests.support.small_vllm import TEXT_ONLY
from tests.support.waiting import until

pytestmark = pytest.mark.vllm


def write_job(folder: Path, model: Path, **tables: dict[str, Any]) -> None:
    options = TEXT_ONLY | {"worker_cls": "tests.support.failing_worker.FailingWorker"}
    job = {"name": "tried", "input": {"path": "rows.jsonl"}, "prompt": {"user": "{{ q }}"}}
    job |= {"engine": {"model": str(model), "options": options}, "sampling": {"max_tokens": 12}}
    (folder / "job.toml").write_text(tomlkit.dumps(with_tables(job, tables)))


@pytest.fixture
def folder(tmp_path: Path, text_model: Path) -> Path:
    write_job(tmp_path, text_model)
    write_jsonl(tmp_path / "rows.jsonl", ({"q": f"tell me of {n}"} for n in range(36)))
    return tmp_path


def tune(
    folder: Path, *args: str, **faults: Any
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """The command with ``--json``, and what it printed. It leaves only the runs of its trials behind."""
    before, scratch = {path.name for path in folder.iterdir()}, folder.parent / f"{folder.name}-tmp"
    scratch.mkdir()
    variables = {"BATCHKIT_TEST_FAULTS": json.dumps(faults), "TMPDIR": str(scratch)}
    ended = batchkit(*args, "--json", cwd=folder, start=Fork, **variables)
    assert {path.name for path in folder.iterdir()} - before <= {"output"}
    assert not [path for path in scratch.iterdir() if "batchkit" in path.name]
    until(lambda: not any(is_in(process, folder) for process in psutil.process_iter()), within_s=5)
    assert ended.stdout.startswith("{"), ended.stderr
    return ended, json.loads(ended.stdout)


def is_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.cwd() == str(folder)
    except psutil.Error:
        return False


def statuses(found: dict[str, Any]) -> dict[int, str]:
    return {line["batch_size"]: line["status"] for line in found["batch_sizes"]}


@pytest.mark.release
def test_find_bs_finds_what_fits(folder: Path) -> None:
    """Eight do not even load, and six run out of memory once they run together.

    Steps sleep for much longer than a busy machine can add to them, and every trial answers all rows.
    They are fewer than the 32 on which a search relies to end early.
    """
    write_jsonl(folder / "rows.jsonl", ({"q": f"tell me of {n}"} for n in range(10)))
    before = (folder / "job.toml").read_text()
    args = ("find-bs", "job.toml", "--low", "2", "--seconds", "60", "--write")
    ended, found = tune(folder, *args, load_over=7, over=5, step_s=0.12)
    assert ended.returncode == 0, ended.stderr
    assert statuses(found) == {2: "ok", 4: "ok", 5: "ok", 6: "OOM", 8: "OOM"}
    assert found["largest"] == 5
    assert found["best"] in (4, 5)
    assert not found["stopped_early"]
    for line in found["batch_sizes"]:
        if line["batch_size"] != 8:
            assert line["memory_of"] == "host"
            assert line["memory_gb"] > 0.1
        if line["status"] == "ok":
            assert line["completion_tokens_per_s"] == pytest.approx(
                12 * line["rows_per_s"], rel=0.1
            )
            assert 0 < line["p50_ms"] <= line["p99_ms"]
    assert found["bottleneck"]["resource"] == "decode", found["bottleneck"]
    after = before.replace("max_num_seqs = 16", f"max_num_seqs = {found['best']}")
    assert (folder / "job.toml").read_text() == after


def test_a_cache_that_holds_no_request_does_not_fit(folder: Path) -> None:
    cache = ("--set", "engine.options.kv_cache_memory_bytes=16384")
    ended, found = tune(folder, "find-bs", "job.toml", *cache)
    assert ended.returncode == 1
    assert statuses(found) == {1: "OOM"}
    assert (found["best"], found["largest"]) == (None, None)
    assert "max_model_len" in found["batch_sizes"][0]["reason"]
