"""Our feed answers what ``vllm.LLM.chat`` answers: greedy, float32, row by row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchkit.storage.starts import read_history
from tests.support.forks import Fork, LightFork
from tests.support.model_runs import newest, run_job
from tests.support.small_vllm import SMALL
from tests.support.transformers_jobs import N_ROWS, write_job
from tests.support.vllm_reference import counts, reference

pytestmark = pytest.mark.vllm


def _ours(folder: Path) -> list[dict[str, Any]]:
    return [
        {name: record[name] for name in ("text", "finish_reason")} | counts(record["usage"])
        for record in newest(folder)
    ]


def _conversation(row: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    content: Any = row["q"]
    if "file" in row:
        image = {"type": "image_path", "path": str(folder / row["file"])}
        content = [image, {"type": "text", "text": row["q"]}]
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("images", [False, True], ids=["text", "images"])
def test_a_job_answers_as_llm_chat_does(
    text_model: Path, demo_model: Path, tmp_path: Path, images: bool
) -> None:
    model = demo_model if images else text_model
    options = {name: SMALL[name] for name in SMALL if images or name != "limit_mm_per_prompt"}
    engines = {"vllm": options, "transformers": {"dtype": "float32", "max_model_len": 512}}
    for kind, own in engines.items():
        (folder := tmp_path / kind).mkdir()
        engine = {"kind": kind, "options": own}
        rows = write_job(folder, model, images=images, engine=engine)
        # One of them in a process that nobody has imported vLLM in.
        start = LightFork if kind == "transformers" and not images else Fork
        assert json.loads(run_job(folder, start=start).stdout)["ok"] == N_ROWS
        assert read_history(folder / "output/run").starts[0].engine[kind]

    conversations = [_conversation(row, folder) for row in rows]
    expected = reference({**options, "model": str(model)}, conversations, max_tokens=24)
    assert len({answer["text"] for answer in expected}) > N_ROWS // 2
    for kind in engines:
        ours = _ours(tmp_path / kind)
        different = [n for n in range(N_ROWS) if ours[n] != expected[n]]
        assert len(different) <= (kind == "transformers"), different  # a tie may break otherwise
