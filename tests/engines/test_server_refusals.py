"""What a server refuses of one row is that row's own failure, and never stops the others."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from batchkit.engines.openai.api import retry_after_s
from batchkit.errors import EngineError
from tests.support.chat_server import Refused, error, serving
from tests.support.command_line import batchkit
from tests.support.rows import write_jsonl
from tests.support.server_engine import ask, opened, request, texts
from tests.support.server_runs import records, write_job

pytestmark = [pytest.mark.usefixtures("in_an_empty_folder", "short_pauses"), pytest.mark.slow]

REFUSALS = {
    "403": Refused(403, error("your input was flagged")),
    "402": Refused(402, error("this model costs more")),
    "304": Refused(304, b""),
    "307": Refused(307, b"", Location="/login"),
    "404 of the model": Refused(404, error("The image model was not found", "not_found_error")),
    "404 of a load balancer": Refused(404, b"default backend - 404"),
    **{str(status): Refused(status, b"no") for status in (405, 407, 410, 421, 426, 501)},
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_what_every_request_is_refused_stops_the_run(kind: str) -> None:
    def before(text: str, body: dict[str, Any]) -> None:
        if server.answered.total() >= 4:
            raise REFUSALS[kind]

    with (
        serving(before) as server,
        opened(server, {"max_num_seqs": 2}) as engine,
        pytest.raises(EngineError),
    ):
        ask(engine, map(request, range(12)))


@pytest.mark.parametrize("status", [409, 424, 499])
def test_a_refusal_that_says_nothing_of_the_row_is_tried_again(status: int) -> None:
    """As ``text-generation-inference`` answers 424 to all requests while its model is gone."""
    refused: list[str] = []

    def before(text: str, body: dict[str, Any]) -> None:
        if text not in refused:
            refused.append(text)
            raise Refused(status, {"error": "Request failed during generation"})

    with serving(before) as server, opened(server) as engine:
        done = ask(engine, map(request, range(4)))
    assert [c.error for c in done] == [None] * 4


@pytest.mark.parametrize(("status", "others"), [(429, 0), (429, 12), (504, 12), (408, 0)])
def test_a_row_that_is_always_turned_away_fails_in_the_end_and_no_other(
    status: int, others: int
) -> None:
    def before(text: str, body: dict[str, Any]) -> None:
        if text in ("row 0", "row 1"):
            raise Refused(status, error("Request too large: Limit 30000, Requested 50000"))

    options = {"max_num_seqs": 4, "give_up_s": 0.5}
    with serving(before) as server, opened(server, options) as engine:
        done = ask(engine, map(request, range(2 + others)), within_s=40)
    assert texts(done[:2]) == ["ServerError"] * 2
    assert "Limit 30000" in str(done[0].error)
    assert [c.error for c in done[2:]] == [None] * others


@pytest.mark.parametrize("status", [401, 402, 403, 302, 503, 429, 500])
def test_a_prompt_that_cannot_be_counted_is_too_long_and_stops_nothing(status: int) -> None:
    with serving(context=50, counts=False) as server:
        server.tokenize = Refused(status, error("not for you"), Location="/login")
        write_job(
            server,
            4,
            prompt={"user": "row {{ text }} {{ n }}"},
            retry={"on_too_long": "truncate-middle"},
        )
        rows = [{"n": n, "text": "word " * (90 if n == 1 else 1)} for n in range(4)]
        write_jsonl(Path("rows.jsonl"), rows)
        done = batchkit("run", "job.toml")
        assert done.exit_code == 3, done.stderr
    assert [r["status"] for r in records()] == ["ok", "failed", "ok", "ok"]
    assert records()[1]["error"]["kind"] == "prompt_too_long"


@pytest.mark.parametrize("value", ["Mon, 01 Jan 99999999999999999999 00:00:00 GMT", "nan", "inf"])
def test_a_retry_after_of_any_value_costs_no_row(value: str) -> None:
    asked: list[float] = []

    def before(text: str, body: dict[str, Any]) -> None:
        asked.append(time.monotonic())
        if len(asked) == 1:
            raise Refused(429, error("wait"), Retry_After=value)

    retry_after_s(value)
    if value == "inf":
        return  # it is waited for, a minute at most
    with serving(before) as server, opened(server) as engine:
        (done,) = ask(engine, [request(0)])
    assert done.error is None


LLAMA_CPP = {"owned_by": "llamacpp"}


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (
            {"repetition_penalty": 1.1},
            r"or use its own engine\.options\.extra_body\.repeat_penalty",
        ),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, r"extra_body\.grammar"),
        ({"min_tokens": 5}, "would answer without it; leave it out"),
    ],
)
def test_what_llama_cpp_would_ignore_is_refused(sampling: dict[str, Any], words: str) -> None:
    (name,) = sampling
    with serving(model=LLAMA_CPP) as server:
        write_job(server, 3, sampling=sampling)
        ended = batchkit("run", "job.toml")
        assert (ended.exit_code, server.bodies) == (2, [])
        assert f"sampling.{name}: llama.cpp's server lacks it" in ended.stderr
        assert re.search(words, ended.stderr)
        with opened(server) as engine:
            refused, answered = ask(engine, [request(0, **sampling), request(1)])
    assert f"sampling.{name}: " in str(refused.error)
    assert answered.error is None


@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 1.0, "min_tokens": 0, "stop_token_ids": [], "bad_words": []},
        {"skip_special_tokens": True, "include_stop_str_in_output": False, "top_k": 5},
        {"structured_outputs": {"json": {"type": "object"}}},
    ],
)
def test_what_changes_nothing_for_llama_cpp_is_sent(sampling: dict[str, Any]) -> None:
    with serving(model=LLAMA_CPP) as server:
        write_job(server, 3, sampling=sampling)
        assert batchkit("run", "job.toml").exit_code == 0
    with serving() as server:  # another server has it
        write_job(server, 3, name="b", sampling={"repetition_penalty": 1.1})
        assert batchkit("run", "job.toml").exit_code == 0
