"""The engine for servers that speak OpenAI's API, over real HTTP to a server in this process."""

from __future__ import annotations

import base64
import math
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from PIL import Image

from batchkit.config.loading import make_job
from batchkit.engines.registry import open_preflight
from batchkit.errors import JobError, PromptTooLongError, ServerError
from batchkit.types import Audio, Request, Row, Video, VideoFile
from tests.support.chat_server import MODEL, ChatServer, HangUp, Refused, error, serving
from tests.support.command_line import batchkit
from tests.support.dry_runs import manifest
from tests.support.paths import ROOT
from tests.support.server_engine import ask, job, opened, request
from tests.support.server_runs import answering, records, write_job

pytestmark = pytest.mark.slow

# --- what is sent, and what is made of the answer


def chat(index: int, content: Any) -> Request:
    return Request(Row(index, str(index), {}), [{"role": "user", "content": content}], None, {}, "")


def test_a_chat_is_answered_with_its_text_reason_usage_and_time() -> None:
    with serving(latency_s=0.02) as server, opened(server) as engine:
        (done,) = ask(engine, [request(0, "how are you", max_tokens=3)])
    assert done.choices[0].text == "0 images, asked:"
    assert done.choices[0].finish_reason == "length"
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (3, 3)
    assert done.latency_s >= 0.02
    messages = [{"role": "user", "content": "how are you"}]
    assert server.bodies == [{"model": MODEL, "messages": messages, "max_tokens": 3}]


def test_images_travel_as_png_sound_as_wav_and_a_video_as_its_file() -> None:
    """Frames fail their row."""
    noise = Image.effect_noise((64, 48), 100).convert("RGB")
    image = {"type": "image_pil", "image_pil": noise}
    frames = Video(np.zeros((1, 8, 8, 3), np.uint8), 1.0, 1.0, 1, [0], [0.0])
    asked = [
        [{"type": "text", "text": "before"}, image, image, {"type": "text", "text": "after"}],
        [{"type": "audio", "audio": Audio(np.zeros(800, np.float32), 16000)}],
        [{"type": "video", "video": frames}],
        [{"type": "video", "video": VideoFile(b"film", "video/mp4")}],
    ]
    with serving() as server, opened(server) as engine:
        shown, heard, refused, seen = ask(engine, [chat(n, its) for n, its in enumerate(asked)])
        sent = [body["messages"][0]["content"] for body in server.bodies]
    assert shown.text == "2 images, asked: before after"
    (parts,) = (content for content in sent if len(content) == 4)
    assert [part["type"] for part in parts] == ["text", "image_url", "image_url", "text"]
    assert heard.text == "0 images, asked: 800 samples, 16000 a second"
    url = f"data:video/mp4;base64,{base64.b64encode(b'film').decode()}"
    assert seen.text == f"0 images, asked: {url}"
    assert "only a video's file can be sent" in str(refused.error)


@pytest.mark.parametrize("chat", [True, False])
def test_choices_and_logprobs_have_one_shape_with_and_without_chat(chat: bool) -> None:
    asked = request(0, logprobs=1, max_tokens=2, n=3)
    if not chat:
        asked = Request(asked.row, None, "row 0", asked.sampling, "")
    with serving() as server, opened(server) as engine:
        (done,) = ask(engine, [asked])
    assert [choice.text for choice in done.choices] == ["0 images,"] * 3
    assert done.usage is not None
    assert done.usage.completion_tokens == 6
    first, second = done.choices[0].logprobs
    assert (first["token"], first["logprob"]) == ("0", -0.5)
    assert second["token"] == "images,"
    assert {"token": "x", "logprob": -2.0} in first["top_logprobs"]


SCHEMA = {"type": "object", "properties": {"score": {"type": "integer"}}}
FORMAT = {"name": "answer", "schema": SCHEMA, "strict": True}


@pytest.mark.parametrize(
    ("sampling", "sent"),
    [
        ({"top_p": 0.9, "top_k": 5, "stop": ["x"], "seed": None}, {"top_p": 0.9, "top_k": 5, "stop": ["x"]}),
        ({"logprobs": 0}, {"logprobs": True, "top_logprobs": 0}),
        ({"structured_outputs": {"choice": ["a"]}}, {"structured_outputs": {"choice": ["a"]}}),
        ({"structured_outputs": {"json_object": True}}, {"response_format": {"type": "json_object"}}),
        (
            {"structured_outputs": {"json": SCHEMA}},
            {"response_format": {"type": "json_schema", "json_schema": FORMAT}},
        ),
    ],
)  # fmt: skip
def test_sampling_is_sent_in_the_apis_words(sampling: dict[str, Any], sent: dict[str, Any]) -> None:
    with serving() as server, opened(server) as engine:
        ask(engine, [request(0, **sampling)])
        (body,) = server.bodies
    assert {key: body[key] for key in body.keys() - {"model", "messages", "max_tokens"}} == sent


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_number_that_json_lacks_fails_its_row(number: float) -> None:
    """It would be sent as null, and the server would use its own default."""
    with serving() as server, opened(server) as engine:
        odd, other = ask(engine, [request(0, temperature=number), request(1)])
        assert server.answered.total() == 1
    assert f"sampling.temperature: is {number}, expected a finite number" in str(odd.error)
    assert other.error is None


def test_the_job_may_add_to_the_body_and_take_from_it() -> None:
    options = {"extra_body": {"max_completion_tokens": 7}, "drop": ["max_tokens", "temperature"]}
    prompt = {"chat_template_kwargs": {"enable_thinking": False}}
    with serving() as server, opened(server, options, prompt=prompt) as engine:
        ask(engine, [request(0, temperature=0.0)])
        (body,) = server.bodies
    assert body.keys() == {"model", "messages", "max_completion_tokens", "chat_template_kwargs"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 0}, "engine.options.max_num_seqs: found 0, expected whole number ≥ 1"),
        ({"max_model_length": 5}, "did you mean 'max_model_len'?"),
        ({"max_model_len": 0}, "engine.options.max_model_len: found 0, expected whole number ≥ 1"),
        ({"extra_body": {"stream": True}}, "engine.options.extra_body.stream: set by batchkit"),
        ({"extra_body": {"input": "x"}}, "engine.options.extra_body.input: set by batchkit"),
        ({"extra_body": {"embed_dtype": "float16"}}, "extra_body.embed_dtype: set by batchkit"),
        ({"extra_body": {"endianness": "big"}}, "extra_body.endianness: set by batchkit"),
        ({"drop": "n"}, 'engine.options.drop: found "n", expected list of text'),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], message: str) -> None:
    with serving() as server, pytest.raises(JobError) as refused:
        open_preflight(job(server, options))
    assert message in str(refused.value)


def run_by(command: str, **keys: Any) -> dict[str, Any]:
    return {"base_url": None, "server": {"command": command, **keys}}


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"base_url": None}, "base_url is missing"),
        ({"base_url": None}, "or add [engine.server]"),
        ({"base_url": "localhost:8000/v1"}, "expected http"),
        ({"base_url": "http://me:secret@host/v1"}, "api_key_env"),
        ({"base_url": "http://host:port/v1"}, "expected http"),
        ({"kind": "vllm"}, 'kind is "vllm"'),
        ({"lora": "here"}, "lora"),
        ({"loras": {"a": "here"}}, "set prompt.lora to the adapter's name on the server"),
        ({"model": ""}, "model is missing"),
        ({"reasoning_parser": "qwen3"}, "engine: reasoning_parser: leave it out"),
        # One that the run starts.
        (run_by("serve --port {prot}"), "engine.server.command: command: {prot} is unknown; use {port} and {host}"),
        (run_by("serve --port {port} --name {nothing}"), "{nothing} is unknown; use {port} and {host}"),
        (run_by("serve --port 8080"), "command has no {port}"),
        (run_by("serve 'a {port}"), "can't be split into words"),
        (run_by(""), "command is empty"),
        (run_by("serve --port {port} --api-key sk-secret"), "--api-key would show the key"),
        (run_by("serve --port {port} --api-key=sk-secret"), "--api-key would show the key"),
        (run_by("serve --port {port} --hf-token hf_secret"), "--hf-token would show the key"),
        ({"server": {"command": "serve {port}"}}, "are both given"),
        ({**run_by("serve {port}"), "kind": "vllm"}, 'server is for kind = "openai-server"'),
        ({"base_url": None, "server": {}}, "server.command is missing"),
        ({"base_url": None, "server": {"comand": "serve {port}"}}, "did you mean 'command'"),
        (run_by("serve {port}", health="health"), "server.health"),
        (run_by("serve {port}", start_timeout_s=0), "server.start_timeout_s"),
    ],
)  # fmt: skip
def test_the_engine_table_is_checked(engine: dict[str, Any], message: str) -> None:
    whole = {"kind": "openai-server", "model": MODEL, "base_url": "http://host/v1", **engine}
    with pytest.raises(JobError) as refused:
        make_job({"engine": whole}, "test")
    assert message in str(refused.value)
    assert "secret" not in str(refused.value)


LLAMA_CPP = {"owned_by": "llamacpp"}


def test_what_llama_cpp_has_is_sent() -> None:
    sampling = {"top_k": 5, "structured_outputs": {"json": {"type": "object"}}}
    with serving(model=LLAMA_CPP) as server, opened(server, sampling=sampling) as engine:
        assert ask(engine, [request(0, **sampling)])[0].error is None


# --- the row's own fault


def test_a_short_key_hides_no_words_of_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of one's own take any key, and many are given such a word."""
    monkeypatch.setenv("OPENAI_API_KEY", "token")
    long = Refused(400, error("5000 tokens are too many", param="input_tokens", code=400))
    with serving(answering([long])) as server, opened(server) as engine:
        (done,) = ask(engine, [request(0)])
    assert isinstance(done.error, PromptTooLongError)
    assert str(done.error) == "5000 tokens are too many"


@pytest.mark.parametrize("others", [0, 8])
def test_a_row_that_the_server_fails_over_fails_and_no_other(others: int) -> None:
    """Also when none but such rows are left, and only a prompt of one word proves the server sound."""
    answers = [
        Refused(500, error("division by zero", "InternalServerError", code=500)),
        Refused(200, b'{"choices": [{"ind'),
        Refused(200, {"choices": []}),
        Refused(200, error("it broke", code=500)),
        HangUp(),
    ]
    with serving(answering(answers)) as server, opened(server) as engine:
        done = ask(engine, map(request, range(5 + others)))
        asked = Counter(body["messages"][0]["content"] for body in server.bodies)
    assert [type(c.error) for c in done[:5]] == [ServerError] * 5
    assert {asked[f"row {n}"] for n in range(5)} == {3}
    assert all(c.error is None for c in done[5:])


# --- whole runs, from the command line


@pytest.mark.usefixtures("in_an_empty_folder")
def test_a_run_with_images_answers_every_row() -> None:
    for n in range(60):
        Image.effect_noise((48, 32), n).convert("RGB").save(f"{n}.jpg")
    with serving(latency_s=0.01) as server:
        prompt = {"user": "say {{ n }}", "images": ["{{ n }}.jpg"]}
        write_job(server, 60, prompt=prompt, media={"root": "."})
        checked = batchkit("validate", "job.toml").stdout
        assert "60 ok" in checked
        assert "prompt tokens: not counted" in checked
        shown = batchkit("run", "job.toml", "--dry-run").stdout
        assert "uncounted prompt tokens, images: 48x32" in shown
        assert "say 0" in shown
        assert server.bodies == []
        ran = batchkit("run", "job.toml")
    assert ran.exit_code == 0, ran.stderr
    assert (ran.json["total"], ran.json["ok"], ran.json["failed"]) == (60, 60, 0)
    assert [r["text"] for r in records()] == [f"1 images, asked: say {n}" for n in range(60)]
    assert sum(r["usage"]["prompt_tokens"] for r in records()) == 60 * (2 + 4)
    assert set(server.answered.values()) == {1}
    assert server.most > 4
    assert manifest()["starts"][0]["engine"] == {"server": server.url, "owned_by": "tests"}


@pytest.mark.usefixtures("in_an_empty_folder")
@pytest.mark.parametrize(
    ("hard", "exit_code", "remedy"),
    [
        (4096, 0, ""),
        (300, 2, "(ulimit -Hn); set this key to 44 or less, or raise the limit"),
        (200, 2, "(ulimit -Hn); raise the limit: even one request needs 257"),
    ],
)
def test_a_run_may_have_as_many_connections_as_it_needs_or_says_so(
    hard: int, exit_code: int, remedy: str
) -> None:
    with serving(latency_s=0.5) as server:
        write_job(server, 150, engine={"options": {"max_num_seqs": 150}})
        run = f"ulimit -Sn 100; ulimit -Hn {hard}; exec {sys.executable} -m batchkit run job.toml"
        path = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(["bash", "-c", run], env=path, capture_output=True, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (exit_code, False), done.stderr
    needed = "engine.options.max_num_seqs: 150 concurrent requests need 406 open files"
    assert (needed in done.stderr) == bool(exit_code)
    assert remedy in done.stderr


@pytest.mark.usefixtures("in_an_empty_folder")
def test_a_run_whose_server_goes_away_stops_and_is_carried_on_at_another_address() -> None:
    def before(text: str, body: dict[str, Any]) -> None:
        if server.answered.total() == 20:
            threading.Thread(target=server.kill).start()
            time.sleep(1)

    server = ChatServer(before)
    write_job(server, 40, engine={"options": {"give_up_s": 1.0, "max_num_seqs": 1}})
    stopped = batchkit("run", "job.toml")
    assert stopped.exit_code == 1
    assert server.url in stopped.stderr
    assert "no row answered for" in stopped.stderr
    done = len(records())
    assert 15 < done < 40
    with serving() as again:
        resumed = batchkit("run", "job.toml", "--set", f"engine.base_url={again.url}")
    assert resumed.exit_code == 0, resumed.stderr
    assert again.answered.total() == 40 - done
    assert [(r["index"], r["status"]) for r in records()] == [(n, "ok") for n in range(40)]
