"""``plan`` with real vLLM: one engine for the whole sample, and answers that the run keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from tests.support.forks import Fork
from tests.support.own_process import batchkit
from tests.support.rows import read_jsonl, write_jsonl
from tests.support.small_vllm import SMALL

pytestmark = pytest.mark.vllm

N_ROWS, SAMPLED = 90, 24


def test_vllm_answers_the_sample_with_one_engine(tmp_path: Path, text_model: Path) -> None:
    lengths = [3 + 40 * (n % 9 == 4) + n % 7 for n in range(N_ROWS)]
    job = {
        "name": "forecast",
        "input": {"path": "rows.jsonl"},
        "prompt": {"user": "tell me of {{ n }}"},
        "engine": {"model": str(text_model), "options": SMALL},
        "sampling": {"sampling_column": "params", "ignore_eos": True},
        "budget": {"price_per_gpu_hour": 3600.0},
    }
    rows = [{"n": n, "params": {"max_tokens": tokens}} for n, tokens in enumerate(lengths)]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    (tmp_path / "job.toml").write_text(tomlkit.dumps(job))
    scratch = tmp_path / "tmp"
    scratch.mkdir()

    def ended(*args: str) -> tuple[dict[str, Any], str]:
        found = batchkit(*args, cwd=tmp_path, start=Fork, TMPDIR=str(scratch))
        assert found.returncode == 0, found.stderr
        last: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
        return last, found.stderr

    found, said = ended("plan", "job.toml", "--rows", str(SAMPLED), "--json")
    assert said.count("rendering the first rows meanwhile") == 3
    assert said.count("is loaded already") == 2
    assert "answering 18 rows of the sample, 16 at a time" in said
    assert not [path for path in scratch.iterdir() if "batchkit" in path.name]
    assert [path.name for path in (tmp_path / "output").iterdir()] == ["forecast"]
    assert found["prompts"]["exact"]
    assert found["load_seconds"] > 0
    assert found["running"] == 16
    assert 0 < found["seconds"]["low"] < found["seconds"]["high"]
    assert found["price"]["expected"] > found["load_seconds"]

    ran, said = ended("run", "job.toml")
    assert (ran["ok"], ran["skipped"]) == (N_ROWS, SAMPLED)
    usages = [r["usage"] for r in read_jsonl(tmp_path / "output/forecast/results.jsonl")]
    assert sum(usage["completion_tokens"] for usage in usages) == sum(lengths)
    answers, prompts = found["completion_tokens"], found["prompt_tokens"]
    assert answers["low"] <= sum(lengths) <= answers["high"]
    assert prompts["low"] == prompts["high"] == sum(usage["prompt_tokens"] for usage in usages)
    assert f"batchkit: forecast for the {N_ROWS - SAMPLED} remaining rows: " in said
    assert "batchkit: it took " in said
