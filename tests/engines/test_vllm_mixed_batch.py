"""OpenAI batch files whose lines are for several endpoints, on real vLLM: which of them one model answers, and how."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomlkit
from PIL import Image

from batchkit.storage.log import RESULTS
from batchkit.storage.newest import read_newest
from tests.support.forks import Fork, LightFork
from tests.support.own_process import batchkit
from tests.support.pooling_models import build_classifier, build_embedding_model
from tests.support.rows import read_jsonl, write_jsonl
from tests.support.small_vllm import SMALL, TEXT_ONLY
from tests.support.vllm_server import serving

pytestmark = pytest.mark.vllm

PASSAGES = ["tea is hot", "coffee keeps you awake"]
CHAT = [{"role": "user", "content": "tell me about tea"}]
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no"]}},
    "required": ["answer"],
    "additionalProperties": False,
}


def run(
    folder: Path, name: str, lines: list[tuple[str, dict[str, Any]]], **job: Any
) -> tuple[dict[int, Any], dict[int, str]]:
    """The bodies of the exported answers, and the messages of the failed lines, by their numbers."""
    write_jsonl(
        folder / "batch.jsonl",
        [
            {"custom_id": f"c{n}", "method": "POST", "url": url, "body": body}
            for n, (url, body) in enumerate(lines)
        ],
    )
    tables = {"name": name, "input": {"path": "batch.jsonl"}, **job}
    (folder / "job.toml").write_text(tomlkit.dumps(tables))
    start = LightFork if job["engine"]["kind"] == "openai-server" else Fork
    done = batchkit("run", "job.toml", cwd=folder, start=start)
    records = list(read_newest(folder / "output" / name / RESULTS))
    assert len(records) == len(lines), done.stderr
    failed = {r["index"]: r["error"]["message"] for r in records if r["error"]}
    assert {r["error"]["kind"] for r in records if r["error"]} <= {"invalid_request"}
    assert done.returncode == (3 if failed else 0), done.stderr
    assert batchkit("export", "job.toml", "--openai", cwd=folder).returncode == 0
    answers = read_jsonl(folder / "output" / name / "results.openai.jsonl")
    return {int(line["custom_id"][1:]): line["response"]["body"] for line in answers}, failed


# --- generating

IMAGE = {"type": "input_image", "image_url": "a.png"}
PARTS = [{"type": "input_text", "text": "What is it?"}, IMAGE]
CHAT_PARTS = [
    {"type": "text", "text": "What is it?"},
    {"type": "image_url", "image_url": {"url": "a.png"}},
]
AS_JSON = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}}
SYSTEM = {"role": "system", "content": "Be brief."}
# Each /v1/responses line follows one that asks the same of another endpoint.
LINES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 12}),
    ("/v1/responses", {"input": "tell me about tea", "max_output_tokens": 12}),
    ("/v1/chat/completions", {"messages": [SYSTEM, *CHAT], "max_completion_tokens": 9, "top_p": 0.9}),
    ("/v1/responses", {"input": CHAT, "instructions": "Be brief.", "max_output_tokens": 9, "top_p": 0.9}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": CHAT_PARTS}]}),
    ("/v1/responses", {"input": [{"role": "user", "content": PARTS}]}),
    ("/v1/chat/completions", {
        "messages": CHAT, "response_format": {
            "type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}}),
    ("/v1/responses", {"input": CHAT, "text": AS_JSON}),
    ("/v1/chat/completions", {"messages": CHAT, "seed": 7, "temperature": 1.0, "min_tokens": 3}),
    ("/v1/responses", {"input": CHAT, "seed": 7, "temperature": 1.0, "min_tokens": 3}),
    ("/v1/completions", {"prompt": "tea is", "max_tokens": 5}),
    ("/v1/embeddings", {"input": "tea"}),
    ("/v1/score", {"text_1": "tea", "text_2": "hot"}),
    ("/v1/responses", {"input": "tea", "tools": [{"type": "web_search"}], "stream": True}),
    ("/v1/images/generations", {"file_url": "a.wav"}),
]  # fmt: skip
ASKED_TWICE = (0, 2, 4, 6, 8)
REFUSED = {
    11: 'url: /v1/embeddings is for task = "embed", and the job has task = "generate", which serves chat',
    12: 'url: /v1/score is for task = "score", and the job has task = "generate", which serves chat',
    13: "body: of /v1/responses these are not supported: stream, tools (web_search); leave them out",
    14: "url: '/v1/images/generations' is not one of",
}


def test_lines_for_chat_completions_and_responses_are_answered_in_one_run(
    demo_model: Path, tmp_path: Path
) -> None:
    Response = pytest.importorskip("openai.types.responses").Response
    Image.effect_noise((96, 64), 1).convert("RGB").save(tmp_path / "a.png")
    common = {"media": {"root": "."}, "sampling": {"max_tokens": 96}}

    def check(bodies: dict[int, Any], failed: dict[int, str]) -> None:
        assert bodies.keys() == {*range(11)}
        for number, message in REFUSED.items():
            assert failed.pop(number).startswith(message)
        assert not failed
        for n in ASKED_TWICE:
            chat, response = bodies[n], Response.model_validate(bodies[n + 1])
            (choice,) = chat["choices"]
            assert response.output_text == choice["message"]["content"], n
            is_cut = choice["finish_reason"] == "length"
            assert response.status == ("incomplete" if is_cut else "completed")
            assert response.usage is not None
            sent, answered = response.usage.input_tokens, response.usage.output_tokens
            assert sent == chat["usage"]["prompt_tokens"]
            assert answered == chat["usage"]["completion_tokens"]
        assert json.loads(bodies[7]["output"][0]["content"][0]["text"])["answer"] in ("yes", "no")
        assert Response.model_validate(bodies[1]).usage.output_tokens <= 12
        assert bodies[10]["usage"]["completion_tokens"] <= 5

    here = {"kind": "vllm", "model": str(demo_model), "options": SMALL}
    ours, failed = run(tmp_path, "here", LINES, engine=here, **common)
    check(ours, failed)
    with serving(demo_model, SMALL, tmp_path / "server.log") as url:
        there = {"kind": "openai-server", "model": str(demo_model), "base_url": url}
        served, failed = run(tmp_path, "there", LINES, engine=there, **common)
        check(served, failed)
        body = {"model": str(demo_model), "temperature": 0, "store": False, **LINES[1][1]}
        direct = Response.model_validate(_posted(f"{url}/responses", body))
    log = (tmp_path / "server.log").read_text()
    assert log.count("POST /v1/responses") == 1  # the run asks the same as chat
    texts = [[body.get("output") or body.get("choices") for body in found.values()] for found in (
        ours, served)]  # fmt: skip
    assert texts[0] == texts[1]
    assert direct.output_text == Response.model_validate(ours[1]).output_text


def _posted(url: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


# --- pooling

POOLED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/embeddings", {"input": "tea is hot"}),
    ("/v1/embeddings", {"input": "hot tea"}),
    ("/classify", {"input": "tea is hot"}),
    ("/v1/score", {"text_1": "hot tea", "text_2": "tea is hot"}),
    ("/v2/rerank", {"query": "hot tea", "documents": PASSAGES}),
    ("/v1/responses", {"input": "tea"}),
]
VECTORS, CLASSES, SCORES = (0, 1), (2,), (3, 4)


def embedding(folder: Path, text_model: Path) -> Path:
    return build_embedding_model(folder, text_model)


def classifier(folder: Path, text_model: Path) -> Path:
    return build_classifier(folder, text_model)


def cross_encoder(folder: Path, text_model: Path) -> Path:
    return build_classifier(folder, text_model, labels=("relevant",))


@pytest.mark.parametrize(
    ("build", "task", "answered", "by_engine"),
    [
        (embedding, "token_embed", (*VECTORS, *SCORES), {}),
        (embedding, "score", (*VECTORS, *SCORES), dict.fromkeys(CLASSES, "embed and score")),
        (classifier, "classify", CLASSES, dict.fromkeys(SCORES, "classify")),
        (cross_encoder, "score", (*CLASSES, *SCORES), dict.fromkeys(VECTORS, "classify and score")),
    ],
)
def test_a_line_that_the_model_can_not_answer_fails_alone(
    text_model: Path,
    tmp_path: Path,
    build: Callable[[Path, Path], Path],
    task: str,
    answered: tuple[int, ...],
    by_engine: dict[int, str],
) -> None:
    model = build(tmp_path / "model", text_model)
    convert = {"convert": "embed"} if build is embedding else {}
    engine = {"kind": "vllm", "model": str(model), "options": {**TEXT_ONLY, **convert}}
    bodies, failed = run(tmp_path, "a", POOLED, engine=engine, task=task)
    assert tuple(bodies) == answered
    assert failed.keys() == {*range(6)} - {*answered}
    for number, served in by_engine.items():
        assert failed[number].startswith(f"url: /{POOLED[number][0].rsplit('/', 1)[1]} is for")
        assert f'with task = "{task}", serves {served} only' in failed[number]
    if task == "token_embed":
        document, query = (np.array(bodies[n]["data"][0]["data"]) for n in VECTORS)
        similar = (query @ document.T).max(axis=1).sum()  # as ColBERT compares
        assert bodies[3]["data"][0]["score"] == pytest.approx(similar, rel=1e-4)
        scores = {item["index"]: item["relevance_score"] for item in bodies[4]["results"]}
        assert scores[0] == pytest.approx(similar, rel=1e-4)
