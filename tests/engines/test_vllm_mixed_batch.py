"""OpenAI batch files whose lines are for several endpoints, on real vLLM: which of them one model answers, and how;
and that vLLM's own run-batch answers the same."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support.forks import Fork, LightFork
from tests.support.model_runs import newest, write_job
from tests.support.own_process import batchkit
from tests.support.pooling_models import build_classifier, build_embedding_model
from tests.support.rows import read_jsonl, write_jsonl
from tests.support.small_vllm import SMALL, TEXT_ONLY
from tests.support.vllm_server import run_batch, serving

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
) -> tuple[dict[int, Any], dict[int, Any]]:
    """The bodies of the exported answers, and the errors of the failed lines, by their numbers."""
    write_batch(folder, lines)
    once = {"deduplicate": False}  # run-batch computes each line
    write_job(folder, name=name, input={"path": "batch.jsonl"}, run=once, **job)
    start = LightFork if job["engine"]["kind"] == "openai-server" else Fork
    done = batchkit("run", "job.toml", cwd=folder, start=start)
    records = newest(folder, name)
    assert len(records) == len(lines), done.stderr
    failed = {r["index"]: r["error"] for r in records if r["error"]}
    assert done.returncode == (3 if failed else 0), done.stderr
    assert batchkit("export", "job.toml", "--openai", cwd=folder).returncode == 0
    return by_number(read_jsonl(folder / "output" / name / "results.openai.jsonl")), failed


def write_batch(folder: Path, lines: list[tuple[str, dict[str, Any]]]) -> Path:
    rows = [
        {"custom_id": f"c{n}", "method": "POST", "url": url, "body": body}
        for n, (url, body) in enumerate(lines)
    ]
    return write_jsonl(folder / "batch.jsonl", rows)


def by_number(answers: list[dict[str, Any]]) -> dict[int, Any]:
    """The bodies of answers that are no error."""
    return {
        int(line["custom_id"][1:]): line["response"]["body"]
        for line in answers
        if not line.get("error")
    }


def through(url: str, model: Path) -> dict[str, Any]:
    return {"kind": "openai-server", "model": str(model), "base_url": url}


def here(model: Path, **options: Any) -> dict[str, Any]:
    return {"kind": "vllm", "model": str(model), "options": {**TEXT_ONLY, **options}}


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
REFUSED = {11: "url", 12: "url", 13: "body", 14: "url"}  # and the keys that their messages name


def test_lines_for_chat_completions_and_responses_are_answered_in_one_run(
    demo_model: Path, tmp_path: Path
) -> None:
    Response = pytest.importorskip("openai.types.responses").Response
    Image.effect_noise((96, 64), 1).convert("RGB").save(tmp_path / "a.png")
    common = {"media": {"root": "."}, "sampling": {"max_tokens": 96}}

    def check(bodies: dict[int, Any], failed: dict[int, Any]) -> None:
        assert bodies.keys() == {*range(11)}
        for number, key in REFUSED.items():
            error = failed.pop(number)
            assert (error["kind"], error["message"].partition(": ")[0]) == ("invalid_request", key)
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

    engine = {"kind": "vllm", "model": str(demo_model), "options": SMALL}
    ours, failed = run(tmp_path, "here", LINES, engine=engine, **common)
    check(ours, failed)
    with serving(demo_model, SMALL, tmp_path / "server.log") as url:
        engine = through(url, demo_model)
        served, failed = run(tmp_path, "there", LINES, engine=engine, **common)
        check(served, failed)
        body = {"model": str(demo_model), "temperature": 0, "store": False, **LINES[1][1]}
        direct = Response.model_validate(_posted(f"{url}/responses", body))
    log = (tmp_path / "server.log").read_text()
    assert log.count("POST /v1/responses") == 1  # the run asks the same as chat
    here, there = (
        [b.get("output") or b.get("choices") for b in f.values()] for f in (ours, served)
    )
    assert here == there
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
embedding, classifier = build_embedding_model, build_classifier
cross_encoder = partial(build_classifier, labels=("relevant",))


@pytest.mark.parametrize(
    ("build", "task", "answered", "by_engine"),
    [
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
    bodies, failed = run(tmp_path, "a", POOLED, engine=here(model, **convert), task=task)
    assert tuple(bodies) == answered
    assert failed.keys() == {*range(6)} - {*answered}
    assert {error["kind"] for error in failed.values()} == {"invalid_request"}
    for number, served in by_engine.items():
        message = failed[number]["message"]
        assert message.startswith(f"url: /{POOLED[number][0].rsplit('/', 1)[1]} is for")
        assert f'with task = "{task}", serves only {served}' in message


# --- as run-batch

SERVED = {**TEXT_ONLY, "runner": "pooling"}
NEAR = {"rel": 1e-5, "abs": 1e-5}
TOO_LONG = "word " * 600
# The parts of an answer that are another's for each program.
OWN = ("id", "created")
THREE = [*PASSAGES, "some water"]
BODIES: list[tuple[str, dict[str, Any]]] = [
    *(("/v1/embeddings", {"input": "about tea " * n}) for n in range(1, 20)),
    ("/v1/embeddings", {"input": ["one text in a list"]}),
    ("/v1/embeddings", {"messages": CHAT}),
    ("/v1/embeddings", {"input": CHAT}),
    ("/v1/embeddings", {"input": "fewer numbers", "dimensions": 16}),
    ("/v1/embeddings", {"input": "as they are", "use_activation": False}),
    ("/v1/embeddings", {"input": TOO_LONG}),
    ("/v1/embeddings", {"input": ""}),
    ("/v1/score", {"text_1": "tea", "text_2": THREE[0]}),
    ("/v1/score", {"queries": "tea", "documents": THREE}),
    ("/score", {"data_1": ["tea"], "data_2": THREE}),
    ("/v1/rerank", {"query": "tea", "documents": THREE}),
    ("/rerank", {"query": "hot tea", "documents": THREE, "top_n": 2}),
    ("/v1/rerank", {"query": "tea", "documents": THREE[1]}),
    ("/v1/rerank", {"query": "tea", "documents": ["fine", TOO_LONG], "max_tokens_per_doc": 9}),
    ("/v1/score", {"text_1": TOO_LONG, "text_2": THREE, "max_tokens_per_query": 9}),
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


@pytest.mark.release
def test_a_batch_file_is_answered_as_run_batch_answers_it_by_a_server_and_by_the_engine(
    text_model: Path, tmp_path: Path
) -> None:
    model = embedding(tmp_path / "model", text_model)
    lines = [(url, {"model": str(model), **body}) for url, body in BODIES]
    options = {**SERVED, "convert": "embed"}
    theirs = by_number(run_batch(model, options, write_batch(tmp_path, lines)))
    assert len(theirs) == len(lines) - 3

    def answers_of(name: str, engine: dict[str, Any]) -> None:
        for task in ("embed", "score"):  # the model does both
            ours, failed = run(tmp_path, f"{name}-{task}", lines, task=task, engine=engine)
            kinds = [error["kind"] for error in failed.values()]
            assert kinds == ["prompt_too_long", "invalid_request", "prompt_too_long"]
            assert_alike(ours, theirs, "")

    with serving(model, options, tmp_path / "server.log") as url:
        answers_of("served", through(url, model))
    answers_of("here", here(model, convert="embed"))


def test_a_cross_encoder_reads_what_a_line_says_to_its_template(
    text_model: Path, tmp_path: Path
) -> None:
    model = cross_encoder(tmp_path / "cross-encoder", text_model)
    template = tmp_path / "template.jinja"
    sides = "{{ messages[0]['content'] }} / {{ messages[1]['content'] }}"
    template.write_text("{{ instruction | default('compare') }}: " + sides)
    found = ({}, {"instruction": "find"}, {"chat_template_kwargs": {"instruction": "find"}})
    lines = [("/v1/rerank", {"query": "tea", "documents": THREE, **more}) for more in found]
    options = {"chat_template": str(template)}
    theirs = by_number(run_batch(model, {**SERVED, **options}, write_batch(tmp_path, lines)))
    ours, failed = run(tmp_path, "a", lines, task="score", engine=here(model, **options))
    assert not failed
    assert_alike(ours, theirs, "")
    plain, *asked = ([r["relevance_score"] for r in ours[n]["results"]] for n in range(3))
    assert asked[0] == asked[1]
    assert plain != pytest.approx(asked[0], abs=1e-3)
