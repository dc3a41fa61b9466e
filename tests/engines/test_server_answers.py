"""What a server answers besides text: reasoning and tool calls, over real HTTP."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.chat_server import serving
from tests.support.command_line import batchkit
from tests.support.server_runs import answering, assert_settled, records, said, write_job

pytestmark = pytest.mark.usefixtures("in_an_empty_folder", "short_pauses")

CALL = {
    "id": "call-1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
}


def answer(content: str | None, finish_reason: str = "stop", **beside: Any) -> dict[str, Any]:
    body = said(content, finish_reason)
    body["choices"][0]["message"] |= beside
    return body


def run(*bodies: dict[str, Any], **tables: Any) -> tuple[int, list[dict[str, Any]]]:
    with serving(answering([*bodies])) as server:
        write_job(server, len(bodies), **tables)
        done = batchkit("run", "job.toml")
        assert_settled(server)
    return done.exit_code, records()


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_kept_beside_the_answer(name: str) -> None:
    body = answer("Paris", **{name: "It is the capital."})
    body["usage"]["completion_tokens_details"] = {"reasoning_tokens": 3}
    code, (record,) = run(body)
    assert code == 0
    assert (record["text"], record["reasoning"]) == ("Paris", "It is the capital.")
    assert record["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "reasoning_tokens": 3}
    assert "tool_calls" not in record


def test_a_tool_call_is_an_answer() -> None:
    code, (record,) = run(answer(None, "tool_calls", tool_calls=[CALL]))
    assert (code, record["status"], record["text"]) == (0, "ok", "")
    assert record["tool_calls"] == [CALL]
    assert record["finish_reason"] == "tool_calls"
    assert "reasoning" not in record


def test_a_tool_call_is_no_json_that_lacks_something() -> None:
    parse = {"output": {"parse": "json"}}
    code, (call, text) = run(answer(None, tool_calls=[CALL]), answer('{"a": 1}'), **parse)
    assert code == 0
    assert ("parsed" in call, text["parsed"]) == (False, {"a": 1})


def test_choices_have_their_own_reasoning_and_calls() -> None:
    first, second = answer("one", reasoning="a"), answer(None, tool_calls=[CALL])
    second["choices"][0]["index"] = 1
    first["choices"] += second["choices"]
    code, (record,) = run(first, sampling={"n": 2, "temperature": 1.0})
    assert code == 0
    assert record["reasoning"] == "a"
    assert record["choices"] == [
        {"text": "one", "reasoning": "a", "finish_reason": "stop", "logprobs": None},
        {"text": "", "tool_calls": [CALL], "finish_reason": "stop", "logprobs": None},
    ]


def test_an_answer_cut_off_inside_its_reasoning_says_so() -> None:
    cut, blank = answer(None, "length", reasoning="First, I"), answer(" ", "length")
    code, (inside, without) = run(cut, blank)
    assert code == 3
    assert (inside["status"], inside["text"], inside["finish_reason"]) == ("failed", None, "length")
    assert inside["reasoning"] == "First, I"
    assert inside["error"]["kind"] == without["error"]["kind"] == "empty"
    assert "inside its reasoning" in inside["error"]["message"]
    assert "sampling.max_tokens" in inside["error"]["message"]
    assert "reasoning" not in without["error"]["message"]
    status = json.loads(batchkit("status", "job.toml", "--json").stdout)
    assert status["failed_by_kind"] == {"empty": 2}
    assert status["cut_off_in_reasoning"] == 1
    note = "1 of them cut off inside the reasoning"
    assert note in batchkit("status", "job.toml").stdout


def test_show_has_calls_and_the_beginning_of_the_reasoning() -> None:
    body = answer(None, "tool_calls", reasoning="Well,\n" + "so " * 500, tool_calls=[CALL, CALL])
    body["usage"]["completion_tokens_details"] = {"reasoning_tokens": 3}
    run(body, answer(None, "length", reasoning="Hm"))
    shown = batchkit("show", "job.toml").stdout.splitlines()
    at = shown.index('→ weather({"city": "Paris"})')
    assert shown[at + 1] == 'weather({"city": "Paris"})'
    assert shown[at - 1].startswith("(thought: Well, so so")
    assert shown[at - 1].endswith("…)")
    assert len(shown[at - 1]) < 400
    assert "4 completion tokens, 3 of them reasoning" in shown[at + 2]
    assert "(thought: Hm)" in shown


@pytest.mark.parametrize(
    ("calls", "kept"),
    [
        ([{"function": {"name": "f", "arguments": {"a": [1]}}}], [(None, "f", '{"a":[1]}')]),
        ([{"id": 7, "function": {"name": "f"}}, "x", {}], [(None, "f", "{}")]),
        ([{"function": {"name": 7, "arguments": ""}}], None),
        ({"function": {"name": "f", "arguments": ""}}, None),
        ("f()", None),
        ([], None),
    ],
)
def test_calls_of_another_shape_are_fitted_or_left_out(
    calls: Any, kept: list[tuple[str | None, str, str]] | None
) -> None:
    code, (record,) = run(answer("fine", reasoning=["x"], tool_calls=calls))
    assert (code, record["text"]) == (0, "fine")
    assert "reasoning" not in record
    found = record.get("tool_calls") and [
        (call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in record["tool_calls"]
    ]
    assert found == kept
