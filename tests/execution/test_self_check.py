"""``[self_check]`` on real engines: planted faults are found within the first check, and sound engines pass."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from PIL import Image

from tests.support.adapters import write_adapter
from tests.support.chat_server import ChatServer, serving
from tests.support.forks import Fork
from tests.support.model_runs import newest, run_job, write_job
from tests.support.own_process import batchkit, begin
from tests.support.pooling_models import build_embedding_model
from tests.support.rows import read_jsonl
from tests.support.small_vllm import SMALL, TEXT_ONLY
from tests.support.waiting import until

pytestmark = pytest.mark.vllm

GREEDY = {"temperature": 0, "max_tokens": 12, "min_tokens": 12}
LONG = (
    "This is the beginning that all rows have in common, and it is longer than a block of the cache. "
    * 3
)


def checked_job(folder: Path, model: Path, fault: str | None = None, **tables: Any) -> None:
    options = {**TEXT_ONLY, **tables.pop("options", {})}
    if fault is not None:
        worker = "tests.support.wrong_worker.WrongWorker"
        options |= {"worker_cls": worker, "additional_config": {"fault": fault}}
    job = {
        "prompt": {"user": "{{ q }}"},
        "engine": {"model": str(model), "options": options, **tables.pop("engine", {})},
        "self_check": {"rows": 6},
        **tables,
    }
    if "task" not in tables:
        job["sampling"] = GREEDY
    rows = tables.pop("rows", [{"q": f"Row {n}: what is it?"} for n in range(40)])
    job.pop("rows", None)
    write_job(folder, rows, **job)


def server_job(folder: Path, server: ChatServer, **tables: Any) -> None:
    """A job of 32 rows for a server that others may use."""
    server.names.append("m")
    write_job(
        folder,
        [{"q": f"row {n}"} for n in range(32)],
        prompt={"user": "{{ q }}"},
        engine={"kind": "openai-server", "model": "m", "base_url": server.url},
        sampling={"temperature": 0},
        **tables,
    )


def checks_of(folder: Path) -> dict[str, float]:
    found: dict[str, float] = json.loads(batchkit("status", "--json", cwd=folder).stdout)["checked"]
    return found


def assert_sound(folder: Path, n_rows: int) -> None:
    found = checks_of(folder)
    assert (found["rows"], found["different"]) == (n_rows, 0), found


def test_a_token_that_changes_in_a_batch_stops_the_run(tmp_path: Path, text_model: Path) -> None:
    checked_job(tmp_path, text_model, "token")
    done = run_job(tmp_path, exit_code=1)
    assert "rows have another answer if they are computed alone" in done.stderr
    assert len(newest(tmp_path)) == 40  # finished rows are kept
    assert checks_of(tmp_path)["different"] > 0


@pytest.mark.parametrize("fault", ["prefix", "kv"])
def test_wrong_attention_stops_the_run(fault: str, tmp_path: Path, text_model: Path) -> None:
    rows = [{"q": f"{LONG} Row {n}: what is it?"} for n in range(40)]
    options = {"enable_prefix_caching": True, "block_size": 32}
    checked_job(tmp_path, text_model, fault, rows=rows, options=options)
    run_job(tmp_path, exit_code=1)
    assert checks_of(tmp_path)["different"] > 0


def test_a_vector_that_depends_on_the_batch_stops_the_run(tmp_path: Path, text_model: Path) -> None:
    model = build_embedding_model(tmp_path / "embedder", text_model)
    checked_job(tmp_path, model, "padding", task="embed")
    run_job(tmp_path, exit_code=1)
    assert checks_of(tmp_path)["different"] > 0


def test_a_sound_engine_passes(tmp_path: Path, text_model: Path) -> None:
    checked_job(tmp_path, text_model)
    done = run_job(tmp_path)
    assert "6 rows computed again alone: 6 equal" in done.stderr
    counts = {"rows": 6, "equal": 6, "near_ties": 0, "different": 0}
    assert checks_of(tmp_path).items() >= counts.items()
    assert len(read_jsonl(tmp_path / "output/run/results.jsonl")) == 40  # none of them is recorded


def test_a_row_with_the_adapter_of_another_stops_the_run(tmp_path: Path, text_model: Path) -> None:
    adapter = write_adapter(tmp_path / "other", text_model)
    rows = [{"q": f"Row {n}: what is it?", "adapter": "other" if n % 2 else ""} for n in range(40)]
    prompt = {"user": "{{ q }}", "lora": "{{ adapter }}"}
    engine = {"loras": {"other": str(adapter)}}
    once = {"order": "input"}
    tables = {"prompt": prompt, "engine": engine, "run": once}
    options = {"max_loras": 2}  # or rows with and without an adapter are never in one batch
    checked_job(tmp_path, text_model, "adapter", rows=rows, options=options, **tables)
    run_job(tmp_path, exit_code=1)
    assert checks_of(tmp_path)["different"] > 0


@pytest.mark.release
def test_compare_self_finds_the_rows_and_the_setting_that_cures_them(
    tmp_path: Path, text_model: Path
) -> None:
    rows = [{"q": f"{LONG} Row {n}: what is it?"} for n in range(24)]
    options = {"enable_prefix_caching": True, "block_size": 32}
    checked_job(tmp_path, text_model, "prefix", rows=rows, options=options, self_check={"rows": 0})
    run_job(tmp_path)
    before = (tmp_path / "output/run/results.jsonl").read_bytes()
    done = batchkit("compare", "--self", "job.toml", "--json", cwd=tmp_path, start=Fork)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["checked"]["different"] > 0
    assert found["trials"][0]["different"] > 0  # with the run's own settings
    assert found["cure"] == "engine.options.enable_prefix_caching = False"
    assert (tmp_path / "output/run/results.jsonl").read_bytes() == before


@pytest.mark.release
def test_a_check_that_is_killed_is_repeated_by_the_next_start(
    tmp_path: Path, text_model: Path
) -> None:
    slow = {
        "worker_cls": "tests.support.failing_worker.FailingWorker",
        "additional_config": {"step_s": 0.1},
    }
    checked_job(tmp_path, text_model, options=slow)
    starts, log = tmp_path / "output/run/starts.jsonl", tmp_path / "output/run/results.jsonl"
    with begin("run", "job.toml", cwd=tmp_path, start=Fork) as process:
        until(lambda: starts.exists() and b'"check_is_due":true' in starts.read_bytes())
        process.send_signal(signal.SIGKILL)
    before = log.read_bytes()
    assert len(newest(tmp_path)) == 40
    done = run_job(tmp_path)
    assert "6 rows computed again alone: 6 equal" in done.stderr
    assert checks_of(tmp_path)["equal"] == 6
    assert log.read_bytes() == before
    assert "computed again" not in run_job(tmp_path).stderr  # once is enough


def test_images_on_a_sound_engine_pass(tmp_path: Path, demo_model: Path) -> None:
    for n in range(12):
        Image.new("RGB", (64 + 32 * (n % 3), 64), (20 * n, 90, 200)).save(tmp_path / f"{n}.png")
    rows = [{"q": f"What is in picture {n}?", "image": f"{n}.png"} for n in range(12)]
    prompt = {"user": "{{ q }}", "images": ["{{ image }}"]}
    checked_job(tmp_path, demo_model, rows=rows, options=SMALL, prompt=prompt)
    run_job(tmp_path)
    assert_sound(tmp_path, 6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_and_its_batches_pass(dtype: str, tmp_path: Path, text_model: Path) -> None:
    options = {"dtype": dtype, "max_model_len": 512, "max_num_seqs": 8}
    write_job(
        tmp_path,
        [{"q": "tea " * n} for n in range(1, 25)],
        prompt={"user": "{{ q }}"},
        engine={"kind": "transformers", "model": str(text_model), "options": options},
        sampling=GREEDY,
        self_check={"rows": 4},
    )
    run_job(tmp_path)
    assert_sound(tmp_path, 4)


def test_a_server_that_mixes_answers_up_stops_the_run(tmp_path: Path) -> None:
    asked: list[str] = []

    def before(text: str, body: dict[str, Any]) -> str | None:
        """Answers as to the request before, if that is still in work."""
        with server.lock:
            others = [other for other in asked if other not in server.answered]
            asked.append(text)
        return f"asked: {others[-1]}" if others else None

    with serving(before, latency_s=0.05) as server:
        server_job(tmp_path, server, self_check={"rows": 4})
        done = batchkit("run", "job.toml", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert checks_of(tmp_path)["different"] > 0


def test_wrong_answers_found_before_a_signal_still_stop_the_run(tmp_path: Path) -> None:
    lasts = Event()

    def before(text: str, body: dict[str, Any]) -> str:
        """Answers each request differently, and the 38th, which asks for the third row of the check, only later."""
        with server.lock:
            number = len(server.bodies)
        if number >= 38:
            lasts.wait(60)
        return f"answer {number}"

    with serving(before) as server:
        server_job(tmp_path, server, self_check={"rows": 4})
        with begin("run", "job.toml", cwd=tmp_path) as process:
            until(lambda: len(server.bodies) == 38)
            process.send_signal(signal.SIGTERM)
            _, stderr = process.communicate(timeout=60)
        lasts.set()
    assert process.returncode == 1, stderr
    assert "2 of 2 rows have another answer if they are computed alone" in stderr
    assert checks_of(tmp_path)["different"] == 2


def test_another_users_server_is_not_checked_by_default(tmp_path: Path) -> None:
    with serving() as server:
        server_job(tmp_path, server)
        assert batchkit("run", "job.toml", cwd=tmp_path).returncode == 0
        assert sum(server.answered.values()) == 32
    assert checks_of(tmp_path)["rows"] == 0
