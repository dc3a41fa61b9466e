"""SmolLM2 by other ways than ``batchkit run`` on one vLLM: llama.cpp, a DataFrame, two workers, a server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import tomlkit

from batchkit import JobConfig, ProductionBatchProcessor
from tests.support.api_server import content, ended, request, serving, submit, texts_of
from tests.support.forks import Fork
from tests.support.llama_cpp import llama_server
from tests.support.model_runs import answered, newest, run_job, write_job
from tests.support.ray_head import RayHead
from tests.support.real_models import QUESTIONS, real_model, reviews

pytestmark = pytest.mark.real

ROWS = [{"q": question} for question in QUESTIONS[:30]]
GREEDY = {"temperature": 0, "max_tokens": 48}
MOOD = {
    "prompt": {
        "system": "You judge the mood of reviews.",
        "user": "What is the mood of this review, positive or negative?\n\n{{ review }}",
    },
    "sampling": {"temperature": 0, "max_tokens": 8},
    "scoring": {"reference": "mood", "scorers": ["em"]},
}


@pytest.fixture(scope="module")
def alone(expected: list[Any]) -> list[Any]:
    """The answers of ``LLM.chat`` to ``ROWS``."""
    return expected[: len(ROWS)]


def texts(records: list[dict[str, Any]]) -> list[str]:
    return [record["text"] for record in records]


def test_llama_cpp_on_the_quantized_file(
    tmp_path: Path, alone: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of 4 bits give other words, but the same moods."""
    server = llama_server()
    assert server is not None, "run `make llama-server`"
    monkeypatch.setenv("PATH", str(Path(server).parent), prepend=os.pathsep)
    path = real_model("smollm2-135m-instruct") / "model.gguf"
    options = {"max_model_len": 1024, "max_num_seqs": 4}
    engine = {"kind": "openai-server", "model": str(path), "server": {}, "options": options}
    found = answered(tmp_path, ROWS, engine=engine, prompt={"user": "{{ q }}"}, sampling=GREEDY)
    same = sum(ours == one["text"] for ours, one in zip(texts(found), alone, strict=True))
    print(f"llama.cpp, Q4_1: {same} of {len(ROWS)} answers equal vLLM's in float32")
    assert all(record["status"] == "ok" for record in found)
    options["extra_body"] = {"grammar": 'root ::= "positive" | "negative"'}
    found = answered(tmp_path, reviews(), name="mood", engine=engine, **MOOD)
    right = sum(record["scores"]["em"] for record in found)
    print(f"llama.cpp, Q4_1: {right:.0f} of {len(found)} moods right")
    assert right >= 0.95 * len(found)


def test_rows_of_a_dataframe(tmp_path: Path, engine: dict[str, Any], alone: list[Any]) -> None:
    job = JobConfig(
        name="frame",
        engine=engine,
        prompt={"user": "{{ q }}"},
        sampling=GREEDY,
        output={"dir": str(tmp_path / "output"), "keep": ["q"]},
    )
    summary = ProductionBatchProcessor(job).process(pd.DataFrame(ROWS))
    frame = summary.to_pandas()
    assert list(frame["q"]) == QUESTIONS[:30]
    assert list(frame["text"]) == [answer["text"] for answer in alone]


def test_two_workers_on_ray(
    tmp_path: Path, engine: dict[str, Any], alone: list[Any], ray_head: RayHead
) -> None:
    write_job(
        tmp_path,
        ROWS,
        engine=engine,
        prompt={"user": "{{ q }}"},
        sampling=GREEDY,
        workers={"count": 2, "ray_address": ray_head.address, "gpus": 0},
    )
    run_job(tmp_path)
    assert texts(newest(tmp_path)) == [answer["text"] for answer in alone]


def test_the_openai_sdk_and_a_server(
    tmp_path: Path, engine: dict[str, Any], alone: list[Any]
) -> None:
    (tmp_path / "job.toml").write_text(tomlkit.dumps({"engine": engine}))
    name = engine["model"]
    lines = [request(str(n), name, q, **GREEDY) for n, q in enumerate(QUESTIONS[:30])]
    with serving("job.toml", cwd=tmp_path, start=Fork) as served, served.client() as client:
        batch = ended(client, submit(client, lines), within_s=240)
        assert batch.status == "completed"
        found = texts_of(content(client, batch.output_file_id))
    assert found == {str(n): answer["text"] for n, answer in enumerate(alone)}
