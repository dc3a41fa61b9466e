"""What every engine promises: each request comes back exactly once, a failed one with its error."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from batchkit.config.tables import JobConfig
from batchkit.engines import ENGINES
from batchkit.engines.base import Engine
from batchkit.engines.registry import open_engine, open_preflight
from batchkit.errors import JobError, PromptTooLongError
from batchkit.types import Completion, Request
from tests.support.chat_server import MODEL, ChatServer, serving
from tests.support.engine_requests import ask, collect, plain, request, with_image
from tests.support.jobs import with_tables
from tests.support.paths import ROOT
from tests.support.small_vllm import SMALL

pytestmark = pytest.mark.vllm

IN_PROCESS = [*ENGINES]
MODELS = ["vllm", "transformers"]
APART = ("vllm in a process of its own", "transformers in a process of its own")
KINDS = [*IN_PROCESS, *APART, "openai-server of the run's own"]
CHAT_SERVER = f"{sys.executable} -P {ROOT}/tests/support/chat_server.py"
OWN_SERVER = {"command": f"{CHAT_SERVER} --port {{port}} --latency-s 0.01"}


@pytest.fixture(scope="module")
def server() -> Iterator[ChatServer]:
    with serving(latency_s=0.01) as it:
        yield it


@pytest.fixture(scope="module", params=KINDS)
def engine(
    request: pytest.FixtureRequest,
    demo_model: Any,
    server: ChatServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engine]:
    job = _job(request.param, demo_model, server, tmp_path_factory.mktemp("x"))
    with closing(open_engine(job)) as it:
        yield it


def _job(kind: str, model: Any, server: ChatServer, folder: Path, **tables: Any) -> JobConfig:
    engines: dict[str, dict[str, Any]] = {
        "dry-run": {"options": {"latency_s": 0.01, "max_num_seqs": 16}},
        "openai-server": {
            "model": MODEL,
            "options": {"max_num_seqs": 16},
            **({"base_url": server.url} if kind == "openai-server" else {"server": OWN_SERVER}),
        },
        "vllm": {"model": str(model), "options": SMALL, "in_process": kind == "vllm"},
        "transformers": {
            "model": str(model),
            "options": {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 16},
            "in_process": kind == "transformers",
        },
    }
    name = kind.partition(" ")[0]
    made = {"engine": {"kind": name, **engines[name]}, "output": {"dir": str(folder)}}
    return JobConfig(**with_tables(made, tables))


def test_each_request_comes_back_exactly_once(engine: Engine) -> None:
    for index in range(50):
        engine.submit(request(index))
    done = collect(engine, 50)
    assert sorted(c.request.row.index for c in done) == list(range(50))
    assert engine.poll(0.2) == []
    for completion in done:
        assert completion.error is None
        assert completion.choices[0].text
        assert completion.usage is not None
        assert completion.usage.prompt_tokens > 0 < completion.usage.completion_tokens
        assert completion.latency_s >= 0


def test_requests_may_be_submitted_while_others_run(engine: Engine) -> None:
    seen: list[int] = []
    waiting = iter(range(40))
    in_flight = 0
    while len(seen) < 40:
        while in_flight < 5 and (index := next(waiting, None)) is not None:
            engine.submit(request(index))
            in_flight += 1
        for completion in engine.poll(0.05):
            seen.append(completion.request.row.index)
            in_flight -= 1
    assert sorted(seen) == list(range(40))


def test_aborted_requests_come_back_at_most_once_and_the_others_do(engine: Engine) -> None:
    asked = [request(index, max_tokens=64) for index in range(40)]
    for one in asked:
        engine.submit(one)
    seen = [completion.request.row.index for completion in engine.poll(0.05)]
    engine.abort([one for one in asked[1::2] if one.row.index not in seen])
    while not {*seen} >= {*range(0, 40, 2)}:
        seen += [completion.request.row.index for completion in engine.poll(0.05)]
    engine.submit(request(40))
    while 40 not in seen:
        seen += [completion.request.row.index for completion in engine.poll(0.05)]
    while (load := engine.load()).running or load.waiting:  # those that can't be aborted
        seen += [completion.request.row.index for completion in engine.poll(0.05)]
    assert len(seen) == len({*seen})
    assert engine.poll(0.2) == []


def test_an_idle_engine_returns_nothing_in_time(engine: Engine) -> None:
    assert engine.poll(0.01) == []


def test_the_load_is_reported(engine: Engine) -> None:
    """On a busy machine all answers may come before the first look at the load: then again."""
    most = rounds = 0
    while most <= 1 and rounds < 10:
        rounds += 1
        for index in range(40):  # of all lengths: where all end at once, none is running after it
            engine.submit(request(index, max_tokens=4 + index))
        done: list[Completion] = []
        while len(done) < 40:
            done += engine.poll(0.001)
            load = engine.load()
            most = max(most, load.running)
            assert load.running <= engine.max_num_seqs == 16
            assert load.waiting >= 0 <= load.kv_cache_usage <= 1
    assert most > 1


BOTH = {"vllm", "transformers"}
REFUSED: list[tuple[Request, str, str, set[str]]] = [
    (request(1, temperature=-1.0), "invalid_request", "temperature", BOTH),
    (request(1, temperature="hot"), "invalid_request", "temperature", BOTH),
    (request(1, top_k=-5), "invalid_request", "top_k", BOTH),
    (request(1, top_p=0.0), "invalid_request", "top_p", BOTH),
    (request(1, n=2), "invalid_request", "greedy", BOTH),
    (request(1, n=0), "invalid_request", "n", BOTH),
    (request(1, max_tokens=0), "invalid_request", "max_tokens", BOTH),
    (request(1, min_tokens=99), "invalid_request", "min_tokens", BOTH),
    (request(1, seed="x"), "invalid_request", "seed", BOTH),
    (request(1, seed=2**70), "invalid_request", "seed", BOTH),
    (request(1, stop=[1]), "invalid_request", "stop", BOTH),
    (request(1, logprobs=50), "invalid_request", "logprobs", {"vllm"}),
    (request(1, logprobs=-1), "invalid_request", "logprobs", {"transformers"}),
    (request(1, prompt_logprobs=2), "invalid_request", "prompt_logprobs", BOTH),
    (request(1, temprature=1.0), "invalid_request", "did you mean 'temperature'", BOTH),
    (request(1, structured_outputs={"regex": "(("}), "invalid_request", "", BOTH),
    (request(1, structured_outputs={"json": "{"}), "invalid_request", "", BOTH),
    (request(1, structured_outputs={"json": {"type": "nope"}}), "invalid_request", "", BOTH),
    (request(1, structured_outputs={"grammar": "root ::= ("}), "invalid_request", "", BOTH),
    (request(1, structured_outputs={"grammar": "root ::= root"}), "invalid_request", "no next token", {"vllm"}),
    (request(1, structured_outputs={"choice": []}), "invalid_request", "", BOTH),
    (request(1, structured_outputs={"choise": ["a"]}), "invalid_request", "structured", BOTH),
    (request(1, logit_bias={"99999999": 1.0}), "invalid_request", "", BOTH),
    (request(1, logit_bias={"tea": 1.0}), "invalid_request", "logit_bias", BOTH),
    (request(1, logit_bias={"70": "x"}), "invalid_request", "logit_bias", BOTH),
    (request(1, allowed_token_ids=[99999999]), "invalid_request", "token", BOTH),
    (request(1, allowed_token_ids=[]), "invalid_request", "allowed_token_ids", BOTH),
    (request(1, bad_words=[""]), "invalid_request", "", BOTH),
    (request(1, stop=""), "invalid_request", "stop", {"transformers"}),
    (plain(""), "invalid_request", "", BOTH),
    (plain(" tea" * 4000), "prompt_too_long", "has 4000 tokens; max_model_len 512", BOTH),
    (plain(" tea" * 40000), "prompt_too_long", "has 40000 tokens; max_model_len 512", BOTH),
    (request(1, "tea " * 600), "prompt_too_long", "", BOTH),
    (with_image((64, 64), n=3), "invalid_request", "image", {"vllm"}),
    (with_image((8, 4000)), "media", "aspect ratio", BOTH),
    (with_image((2000, 2000)), "prompt_too_long", "", BOTH),
]  # fmt: skip


@pytest.mark.parametrize("engine", MODELS, indirect=True)
def test_a_refused_request_leaves_its_neighbours_alone(engine: Engine) -> None:
    (kind,) = engine.versions.keys() & BOTH
    refused = [found for found in REFUSED if kind in found[-1]]
    asked = [one for bad, *_ in refused for one in (request(1000), bad)]
    done = ask(engine, *asked, request(1000))
    for found, (_, error_kind, word, _) in zip(done[1::2], refused, strict=True):
        assert found.error is not None, (word, found.choices)
        assert found.error.kind == error_kind, found.error
        assert word in str(found.error)
    first, *others = done[::2]
    for other in others:
        assert (other.error, other.choices[0].text) == (None, first.choices[0].text)


@pytest.mark.parametrize("engine", MODELS, indirect=True)
def test_the_longest_prompt_that_fits_is_answered(engine: Engine) -> None:
    answered, refused = ask(engine, plain(" tea" * 511), plain(" tea" * 512))
    assert answered.usage is not None
    assert (answered.usage.prompt_tokens, answered.usage.completion_tokens) == (511, 1)
    assert answered.choices[0].finish_reason == "length"
    assert isinstance(refused.error, PromptTooLongError)
    assert "the prompt has 512 tokens; max_model_len 512" in str(refused.error)


@pytest.mark.parametrize("engine", MODELS, indirect=True)
def test_preflight_counts_tokens_as_the_engine_does(
    engine: Engine, demo_model: Any, server: ChatServer, tmp_path: Path
) -> None:
    (kind,) = engine.versions.keys() & BOTH
    preflight = open_preflight(_job(kind, demo_model, server, tmp_path))
    for one in (request(1), plain("tea and milk"), with_image((96, 64)), with_image((640, 400))):
        (done,) = ask(engine, one)
        assert done.usage is not None
        rendered = preflight.render(one)
        assert (rendered.text, rendered.prompt_tokens) == (done.prompt, done.usage.prompt_tokens)


def test_close_drops_what_is_in_flight_and_may_be_repeated(engine: Engine) -> None:
    """The last one with the engine."""
    engine.submit(request(0))
    engine.close()
    engine.close()


@pytest.mark.parametrize("kind", IN_PROCESS)
def test_preflight_renders_without_the_model(
    kind: str, demo_model: Any, server: ChatServer, tmp_path: Path
) -> None:
    rendered = open_preflight(_job(kind, demo_model, server, tmp_path)).render(request(3))
    assert "tell me about tea 3" in (rendered.text or "")
    if kind == "openai-server":  # only the server could count them
        assert rendered.prompt_tokens is None
    else:
        assert rendered.prompt_tokens is not None
        assert rendered.prompt_tokens > 0


WRONG_JOBS: list[tuple[dict[str, Any], str, str]] = [
    ({"options": {"max_model_length": 5}}, "did you mean 'max_model_len'", "did you mean"),
    ({"options": {"max_model_len": "many"}}, "max_model_len", 'found "many", expected'),
    ({"options": {"max_model_len": 10**9}}, "max_model_len", "at most the model's own"),
    ({"options": {"dtype": "float31"}}, "dtype", "dtype"),
    ({"options": {"chat_template": "/no/such.jinja"}}, "chat_template", "chat_template"),
    ({"options": {"model": "x"}}, "set by batchkit", "has no such name"),
    ({"options": {"data_parallel_size": 2}}, "set workers.count = 2", "has no such name"),
    ({"options": {"max_num_seqs": 0}}, "max_num_seqs", "max_num_seqs: found 0, expected"),
    ({"model": "./nowhere"}, "no folder", "no folder"),
    (
        {"model": str(ROOT)},
        "is not a model's folder: it has no config",
        "is not a model's folder: it has no config",
    ),
    ({"sampling": {"temprature": 1}}, "did you mean 'temperature'", "did you mean 'temperature'"),
    ({"sampling": {"top_p": "high"}}, "top_p", 'sampling.top_p: found "high"'),
    ({"sampling": {"structured_outputs": {"regexp": "a"}}}, "structured", "structured_outputs"),
]


def test_a_name_of_another_engine_is_not_suggested_again() -> None:
    engine = {"kind": "dry-run", "options": {"max_model_len": 5}}
    with pytest.raises(
        JobError, match=r"max_model_len: kind = \"dry-run\" has no such name; known: "
    ):
        open_preflight(JobConfig.model_validate({"engine": engine}))


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("wrong", "of_vllm", "of_transformers"), WRONG_JOBS)
def test_a_wrong_job_is_refused_before_the_model_loads(
    wrong: dict[str, Any],
    of_vllm: str,
    of_transformers: str,
    kind: str,
    demo_model: Any,
    server: ChatServer,
    tmp_path: Path,
) -> None:
    tables = wrong if "sampling" in wrong else {"engine": wrong}
    words = of_vllm if kind == "vllm" else of_transformers
    with pytest.raises(JobError, match=re.escape(words)):
        open_preflight(_job(kind, demo_model, server, tmp_path, **tables))
