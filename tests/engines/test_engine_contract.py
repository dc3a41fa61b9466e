"""What every engine promises: each request comes back exactly once, a failed one with its error."""

from __future__ import annotations

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
from batchkit.types import Completion
from tests.support.chat_server import MODEL, ChatServer, serving
from tests.support.engine_requests import collect, request
from tests.support.paths import ROOT
from tests.support.small_vllm import SMALL

pytestmark = pytest.mark.vllm

IN_PROCESS = [*ENGINES]
KINDS = [
    *IN_PROCESS,
    "vllm in a process of its own",
    "transformers in a process of its own",
    "openai-server of the run's own",
]

OWN_SERVER = {
    "command": f"{sys.executable} -P {ROOT}/tests/support/chat_server.py --port {{port}} --latency-s 0.01"
}


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


def _job(kind: str, model: Any, server: ChatServer, folder: Path) -> JobConfig:
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
    return JobConfig(engine={"kind": name, **engines[name]}, output={"dir": str(folder)})


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
