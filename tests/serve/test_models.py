"""What kinds of models a server answers for, each on the real engine: adapters, vectors, scores, speech, other servers."""

from __future__ import annotations

import base64
import io
import json
import threading
from pathlib import Path
from random import Random
from typing import Any

import openai
import pytest
import tomlkit
from openai.types import CreateEmbeddingResponse
from openai.types.audio import Transcription
from openai.types.chat import ChatCompletion
from PIL import Image

from batchkit.commands.demo_digits import make_recording, write_wav
from tests.support.adapters import write_adapter
from tests.support.api_server import (
    content,
    ended,
    faults_of,
    new_keys,
    request,
    serving,
    submit,
    texts_of,
)
from tests.support.chat_server import MODEL
from tests.support.chat_server import serving as chat_serving
from tests.support.command_line import batchkit
from tests.support.forks import Fork
from tests.support.pooling_models import build_embedding_model
from tests.support.small_vllm import SMALL, TEXT_ONLY
from tests.support.waiting import until

pytestmark = pytest.mark.vllm


def job_file(folder: Path, **tables: Any) -> str:
    (folder / "job.toml").write_text(tomlkit.dumps(tables))
    return "job.toml"


def line(custom_id: str, endpoint: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": endpoint, "body": body}


def bodies(client: openai.OpenAI, lines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The answers of a batch of ``lines``, none of which failed."""
    batch = ended(client, submit(client, lines, endpoint=lines[0]["url"]))
    assert batch.status == "completed", batch
    assert content(client, batch.error_file_id) == []
    found = content(client, batch.output_file_id)
    return {one["custom_id"]: one["response"]["body"] for one in found}


def test_lines_name_an_adapter_as_their_model(tmp_path: Path, text_model: Path) -> None:
    adapters = {
        name: str(write_adapter(tmp_path / name, text_model, seed=seed))
        for seed, name in enumerate(("legal", "medical"))
    }
    engine = {"model": str(text_model), "options": TEXT_ONLY, "loras": adapters}
    job = job_file(tmp_path, engine=engine, budget={"price_per_gpu_hour": 3600})
    names = [text_model.name, *adapters]
    with serving(job, cwd=tmp_path, start=Fork) as served, served.client() as client:
        assert [model.id for model in client.models.list()] == [str(text_model), *names]
        each = [request(f"{name}-{n}", name, f"Row {n}") for n in range(4) for name in names]
        mixed = bodies(client, each)
        assert {body["model"] for body in mixed.values()} == {str(text_model), *adapters}
        texts = {name: body["choices"][0]["message"]["content"] for name, body in mixed.items()}
        assert len({*texts.values()}) > 8
        for name in names:
            alone = submit(client, [one for one in each if one["body"]["model"] == name])
            found = texts_of(content(client, ended(client, alone).output_file_id))
            assert found == {key: texts[key] for key in found}
        paid = [batch.model_dump() for batch in client.batches.list()]
        assert all(batch["price"] == pytest.approx(batch["gpu_seconds"]) for batch in paid)
        assert all(batch["gpu_seconds"] > 0 for batch in paid)


def test_vectors_and_scores(tmp_path: Path, text_model: Path) -> None:
    model = build_embedding_model(tmp_path / "vectors", text_model)
    job = job_file(tmp_path, task="embed", engine={"model": str(model), "options": TEXT_ONLY})
    texts = ["a cat", "a kitten", "a treaty"]
    with serving(job, cwd=tmp_path, start=Fork) as served, served.client() as client:
        lines = [line(text, "/v1/embeddings", model="vectors", input=text) for text in texts]
        for body in bodies(client, lines).values():
            found = CreateEmbeddingResponse.model_validate(body, strict=True)
            assert len(found.data[0].embedding) == 64
        given = {"model": "vectors", "query": "a cat", "documents": texts}
        (ranked,) = bodies(client, [line("r", "/v1/rerank", **given, top_n=2)]).values()
        assert ranked["results"][0]["index"] == 0
        assert len(ranked["results"]) == 2
        pair = {"model": "vectors", "text_1": "a cat", "text_2": texts}
        (scored,) = bodies(client, [line("s", "/v1/score", **pair)]).values()
        assert scored["data"][0]["score"] == pytest.approx(1, abs=1e-3)


def test_a_job_may_score_or_transcribe(tmp_path: Path) -> None:
    """Its file needs no ``[pair]`` and no recordings: each line has its own."""
    dry = ("--set", "engine.kind=dry-run", "--model", "m")
    with serving(*dry, "--set", "task=score", cwd=tmp_path) as served, served.client() as client:
        given = {"model": "m", "query": "a cat", "documents": ["a kitten", "a treaty"]}
        (ranked,) = bodies(client, [line("r", "/v1/rerank", **given)]).values()
        scores = [one["relevance_score"] for one in ranked["results"]]
        assert scores == sorted(scores, reverse=True)
    write_wav(tmp_path / "a.wav", make_recording(Random(1), 20).samples)
    task = ("--set", "task=transcribe", "--folder", "speech")
    with serving(*dry, *task, cwd=tmp_path) as served, served.client() as client:
        file = client.files.create(file=tmp_path / "a.wav", purpose="user_data")
        (heard,) = bodies(
            client, [line("a", "/v1/audio/transcriptions", model="m", file=file.id)]
        ).values()
        assert Transcription.model_validate(heard, strict=True).text
        assert heard["duration"] == heard["usage"]["seconds"] == 20


def test_a_server_elsewhere_answers(tmp_path: Path) -> None:
    with chat_serving() as other:
        engine = {"kind": "openai-server", "model": MODEL, "base_url": other.url}
        job = job_file(tmp_path, engine=engine)
        with serving(job, cwd=tmp_path) as served, served.client() as client:
            found = bodies(client, [request(str(n), MODEL, f"Row {n}") for n in range(50)])
            assert len(found) == 50
            for body in found.values():
                ChatCompletion.model_validate(body, strict=True)
            again = bodies(client, [line("a", "/v1/completions", model=MODEL, prompt="Hello")])
            assert again["a"]["choices"][0]["text"]
    assert json.dumps(found)


def test_models_on_servers_elsewhere_answer_side_by_side(tmp_path: Path) -> None:
    opened = threading.Event()

    def wait(text: str, body: dict[str, Any]) -> None:
        opened.wait(60)

    with chat_serving(wait) as slow, chat_serving() as quick:
        quick.names = ["quick"]
        for server in (slow, quick):
            (name,) = server.names
            engine = {"kind": "openai-server", "model": name, "base_url": server.url}
            (tmp_path / f"{name}.toml").write_text(tomlkit.dumps({"engine": engine}))
        files = [f"{MODEL}.toml", "quick.toml"]
        with serving(*files, cwd=tmp_path) as served, served.client() as client:
            first = submit(client, [request("1", MODEL)])
            until(lambda: slow.bodies)
            assert len(bodies(client, [request("2", "quick")])) == 1
            assert client.batches.retrieve(first.id).status == "in_progress"
            opened.set()
            assert ended(client, first).status == "completed"


def test_images_by_the_id_of_a_file_of_the_same_key(tmp_path: Path, demo_model: Path) -> None:
    job = job_file(tmp_path, engine={"model": str(demo_model), "options": SMALL})
    keys = (job, "--api-key-file", "keys.txt")
    one, other = new_keys("one", "other", cwd=tmp_path)
    image = io.BytesIO()
    Image.effect_noise((64, 64), 90).save(image, "PNG")
    data = base64.b64encode(image.getvalue()).decode()

    def ask(custom_id: str, **source: str) -> dict[str, Any]:
        parts = [
            {"type": "text", "text": "What is it?"},
            {"type": "image_url", "image_url": source},
        ]
        return request(custom_id, demo_model.name, parts)

    with serving(*keys, cwd=tmp_path, start=Fork) as served:
        mine, theirs = served.client(one), served.client(other)
        file = mine.files.create(file=("a.png", image.getvalue()), purpose="vision").id
        by = {"id": {"file_id": file}, "url": {"url": f"data:image/png;base64,{data}"}}
        answers = bodies(mine, [ask(name, **source) for name, source in by.items()])
        texts = {body["choices"][0]["message"]["content"] for body in answers.values()}
        assert len(texts) == 1
        parts = [{"type": "input_image", "file_id": file}]
        message = {"role": "user", "content": parts}
        asked = line("r", "/v1/responses", model=demo_model.name, input=[message])
        assert bodies(mine, [asked])["r"]["usage"]["input_tokens"] > 4

        paths = [f"../one/{file}", f"../../files/{file}", str(tmp_path / "output/serve/serve.db")]
        tries = [{"file_id": file}, *({"url": path} for path in [*paths, f"file://{paths[-1]}"])]
        batch = submit(theirs, [ask(str(n), **source) for n, source in enumerate(tries)])
        failed = content(theirs, ended(theirs, batch).error_file_id)
        assert [found["error"]["code"] for found in failed] == ["media"] * len(tries)
        mine.files.delete(file)
        batch = ended(mine, submit(mine, [ask("gone", file_id=file)]))
        (gone,) = content(mine, batch.error_file_id)
        assert gone["error"]["code"] == "media"
    assert not [*(tmp_path / "output/serve/media/one").iterdir()]


def test_several_models_one_loaded_at_a_time(tmp_path: Path, text_model: Path) -> None:
    model = build_embedding_model(tmp_path / "vectors", text_model)
    tables = {"chat": {"engine": {"model": str(text_model), "options": TEXT_ONLY}}}
    tables["vectors"] = {"task": "embed", "engine": {"model": str(model), "options": TEXT_ONLY}}
    for name, table in tables.items():
        (tmp_path / f"{name}.toml").write_text(tomlkit.dumps(table))
    chat = [request(str(n), text_model.name, f"Row {n}", min_tokens=8) for n in range(300)]
    vectors = [line(str(n), "/v1/embeddings", model="vectors", input=f"{n}") for n in range(20)]
    with (
        serving("chat.toml", "vectors.toml", cwd=tmp_path, start=Fork) as served,
        served.client() as client,
    ):
        names = [one.id for one in client.models.list()]
        assert names == [str(text_model), text_model.name, str(model), model.name]
        made = [submit(client, chat), submit(client, vectors, endpoint="/v1/embeddings")]
        made.append(submit(client, chat[:5]))
        first = submit(client, vectors, endpoint="/v1/embeddings", extra_body={"priority": 1})
        (first, *batches) = (ended(client, batch) for batch in [first, *made])
        for batch in [first, *batches]:
            assert batch.status == "completed", batch
            assert batch.error_file_id is None
        assert [batch.model for batch in batches] == [str(text_model), str(model), str(text_model)]
        assert first.completed_at is not None
        assert first.completed_at <= (batches[0].completed_at or 0)
        assert len(content(client, batches[0].output_file_id)) == 300
        for wrong, code in {
            "mixed": ([*chat[:2], request("v", "vectors")], "mismatched_model"),
            "task": ([request("v", "vectors")], "mismatched_endpoint"),
        }.values():
            failed = ended(client, submit(client, wrong))
            assert [fault.code for fault in faults_of(failed)] == [code]
    job = tmp_path / "chat.toml"
    assert "two models have the name" in batchkit("serve", job, job).refused()
