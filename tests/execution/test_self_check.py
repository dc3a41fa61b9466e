"""``[self_check]`` on real engines: planted faults are found within the first check, and sound engines pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.model_runs import newest, run_job, write_job
from tests.support.own_process import batchkit
from tests.support.pooling_models import build_embedding_model
from tests.support.rows import read_jsonl
from tests.support.small_vllm import TEXT_ONLY

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


def checks_of(folder: Path) -> dict[str, int]:
    found: dict[str, int] = json.loads(batchkit("status", "--json", cwd=folder).stdout)["checked"]
    return found


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
    assert checks_of(tmp_path) == {"rows": 6, "equal": 6, "near_ties": 0, "different": 0}
    assert len(read_jsonl(tmp_path / "output/run/results.jsonl")) == 40  # none of them is recorded
