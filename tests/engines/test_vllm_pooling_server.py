"""Pooling tasks through a real vLLM server, and OpenAI batch files as vLLM's own run-batch answers them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomlkit

from batchkit.storage.log import RESULTS
from batchkit.storage.newest import read_newest
from tests.support.forks import Fork, LightFork
from tests.support.own_process import batchkit
from tests.support.pooling_models import build_classifier, build_embedding_model
from tests.support.rows import read_jsonl, write_jsonl
from tests.support.small_vllm import TEXT_ONLY
from tests.support.vllm_reference import pooled
from tests.support.vllm_server import run_batch, serving

pytestmark = pytest.mark.vllm

SERVED = {**TEXT_ONLY, "runner": "pooling"}
NEAR = {"rel": 1e-5, "abs": 1e-5}
TOO_LONG = "word " * 600
PASSAGES = ["tea is hot", "coffee keeps you awake", "some water"]
CHAT = [{"role": "user", "content": "tell me about tea"}]
# The parts of an answer that are another's for each program.
OWN = ("id", "created")


def run(folder: Path, job: dict[str, Any], exit_code: int) -> list[dict[str, Any]]:
    """The records of the job's run."""
    (folder / "job.toml").write_text(tomlkit.dumps(job))
    start = LightFork if job["engine"]["kind"] == "openai-server" else Fork
    done = batchkit("run", "job.toml", cwd=folder, start=start)
    assert done.returncode == exit_code, done.stderr
    return list(read_newest(folder / "output" / job["name"] / RESULTS))


def exported(folder: Path, name: str) -> dict[str, Any]:
    """The bodies of the answers, by id."""
    run_folder = folder / "output" / name
    assert batchkit("export", run_folder, "--openai", cwd=folder).returncode == 0
    answers = read_jsonl(run_folder / "results.openai.jsonl")
    return {answer["custom_id"]: answer["response"]["body"] for answer in answers}


def through(url: str, model: Path) -> dict[str, Any]:
    return {"kind": "openai-server", "model": str(model), "base_url": url}


def here(model: Path, **options: Any) -> dict[str, Any]:
    return {"kind": "vllm", "model": str(model), "options": {**TEXT_ONLY, **options}}


# --- batch files

BODIES: list[tuple[str, dict[str, Any]]] = [
    *(("/v1/embeddings", {"input": "about tea " * n}) for n in range(1, 20)),
    ("/v1/embeddings", {"input": ["one text in a list"]}),
    ("/v1/embeddings", {"messages": CHAT}),
    ("/v1/embeddings", {"input": CHAT}),
    ("/v1/embeddings", {"input": "fewer numbers", "dimensions": 16}),
    ("/v1/embeddings", {"input": "as they are", "use_activation": False}),
    ("/v1/embeddings", {"input": TOO_LONG}),
    ("/v1/embeddings", {"input": ""}),
    ("/v1/score", {"text_1": "tea", "text_2": PASSAGES[0]}),
    ("/v1/score", {"queries": "tea", "documents": PASSAGES}),
    ("/score", {"data_1": ["tea"], "data_2": PASSAGES}),
    ("/v1/rerank", {"query": "tea", "documents": PASSAGES}),
    ("/rerank", {"query": "hot tea", "documents": PASSAGES, "top_n": 2}),
    ("/v1/rerank", {"query": "tea", "documents": PASSAGES[1]}),
    ("/v1/rerank", {"query": "tea", "documents": ["fine", TOO_LONG], "max_tokens_per_doc": 9}),
    ("/v1/score", {"text_1": TOO_LONG, "text_2": PASSAGES, "max_tokens_per_query": 9}),
    ("/v1/rerank", {"query": "tea", "documents": ["fine", TOO_LONG]}),
]


def assert_alike(ours: Any, theirs: Any, place: str) -> None:
    """The same keys and values; what is null in theirs may be missing in ours."""
    if isinstance(theirs, dict):
        wanted = {key for key, value in theirs.items() if value is not None}
        assert wanted - {*OWN, "completion_tokens"} <= ours.keys(), place
        for key in ours.keys() & wanted - {*OWN}:
            assert_alike(ours[key], theirs[key], f"{place}.{key}")
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs), place
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_alike(one, other, f"{place}[{number}]")
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, **NEAR), place
    else:
        assert ours == theirs, place


@pytest.fixture(scope="module")
def embedding_model(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_embedding_model(tmp_path_factory.mktemp("pooling") / "embedding", text_model)


@pytest.mark.release
def test_a_batch_file_is_answered_as_run_batch_answers_it_by_a_server_and_by_the_engine(
    embedding_model: Path, tmp_path: Path
) -> None:
    lines = [
        {
            "custom_id": f"c{n}",
            "method": "POST",
            "url": url,
            "body": {"model": str(embedding_model), **body},
        }
        for n, (url, body) in enumerate(BODIES)
    ]
    write_jsonl(tmp_path / "all.jsonl", lines)
    options = {**SERVED, "convert": "embed"}
    found = run_batch(embedding_model, options, tmp_path / "all.jsonl")
    theirs = {line["custom_id"]: line["response"]["body"] for line in found if not line["error"]}
    assert len(theirs) == len(lines) - 3

    def answers_of(name: str, engine: dict[str, Any]) -> None:
        for task in ("embed", "score"):  # the model does both
            job = {"name": f"{name}-{task}", "task": task, "engine": engine}
            records = run(tmp_path, job | {"input": {"path": "all.jsonl"}}, 3)
            kinds = [record["error"]["kind"] for record in records if record["error"]]
            assert kinds == ["prompt_too_long", "invalid_request", "prompt_too_long"]
            ours = exported(tmp_path, job["name"])
            assert ours.keys() == theirs.keys()
            for custom_id, body in theirs.items():
                assert_alike(ours[custom_id], body, custom_id)

    with serving(embedding_model, options, tmp_path / "server.log") as url:
        answers_of("served", through(url, embedding_model))
    answers_of("here", here(embedding_model, convert="embed"))


def test_a_cross_encoder_reads_what_a_line_says_to_its_template(
    text_model: Path, tmp_path: Path
) -> None:
    model = build_classifier(tmp_path / "cross-encoder", text_model, labels=("relevant",))
    template = tmp_path / "template.jinja"
    sides = "{{ messages[0]['content'] }} / {{ messages[1]['content'] }}"
    template.write_text("{{ instruction | default('compare') }}: " + sides)
    pair = {"query": "tea", "documents": PASSAGES}
    found = ({}, {"instruction": "find"}, {"chat_template_kwargs": {"instruction": "find"}})
    lines = [
        {"custom_id": f"c{n}", "method": "POST", "url": "/v1/rerank", "body": {**pair, **more}}
        for n, more in enumerate(found)
    ]
    write_jsonl(tmp_path / "batch.jsonl", lines)
    options = {"chat_template": str(template)}
    answers = run_batch(model, {**SERVED, **options}, tmp_path / "batch.jsonl")
    job = {"name": "a", "task": "score", "input": {"path": "batch.jsonl"}}
    plain, *asked = run(tmp_path, job | {"engine": here(model, **options)}, 0)
    ours = exported(tmp_path, "a")
    for answer in answers:
        assert_alike(ours[answer["custom_id"]], answer["response"]["body"], answer["custom_id"])
    assert {tuple(record["score"]) for record in asked} == {tuple(asked[0]["score"])}
    assert plain["score"] != pytest.approx(asked[0]["score"], abs=1e-3)


# --- jobs


def test_a_server_classifies_as_vllm_does_and_a_bad_row_fails_alone(
    text_model: Path, tmp_path: Path
) -> None:
    model = build_classifier(tmp_path / "classifier", text_model)
    texts = [f"question {n} " + "about tea " * (n * 7 % 23) for n in range(12)]
    write_jsonl(tmp_path / "rows.jsonl", [{"q": text} for text in [*texts, "", TOO_LONG]])
    job = {
        "name": "a",
        "task": "classify",
        "input": {"path": "rows.jsonl"},
        "prompt": {"user": "{{ q }}"},
    }
    with serving(model, SERVED, tmp_path / "server.log") as url:
        records = run(tmp_path, job | {"engine": through(url, model)}, 3)
        scored = {"task": "embed", "name": "b", "engine": through(url, model)}
        (tmp_path / "job.toml").write_text(tomlkit.dumps(job | scored))
        refused = batchkit("run", "job.toml", cwd=tmp_path)
    (expected,) = pooled(TEXT_ONLY | {"model": str(model)}, [
        {"method": "classify", "texts": texts, "params": {}}
    ])  # fmt: skip
    for record, probabilities in zip(records, expected, strict=False):
        assert record["probabilities"] == pytest.approx(probabilities, **NEAR)
        assert record["label"] == ("bad", "fair", "good")[int(np.argmax(probabilities))]
    assert len({record["label"] for record in records[:12]}) > 1
    kinds = [record["error"]["kind"] for record in records[12:]]
    assert kinds == ["invalid_request", "prompt_too_long"]
    assert refused.returncode == 1
    assert "/v1/embeddings" in refused.stderr
    assert "its model does not fit the task" in refused.stderr
