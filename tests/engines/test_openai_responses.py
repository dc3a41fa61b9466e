"""Batch lines for ``/v1/responses`` at a server that has it: what is sent, and what each answer means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomlkit
from PIL import Image

from tests.support.chat_server import MODEL, ChatServer
from tests.support.command_line import batchkit
from tests.support.rows import write_jsonl
from tests.support.server_runs import records

pytestmark = pytest.mark.usefixtures("in_an_empty_folder", "short_pauses")

USAGE = {"input_tokens": 5, "output_tokens": 4, "output_tokens_details": {"reasoning_tokens": 3}}
TEXT = {"type": "message", "content": [{"type": "output_text", "text": "fi"}, {"text": "ne"}]}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'}
FUNCTION = {"name": "f", "parameters": {"type": "object"}}


class ResponsesServer(ChatServer):
    """It gives ``found`` to each request for ``/v1/responses``, but to the engine's own word."""

    paths = ChatServer.paths | {"/v1/responses"}
    found: Any = None

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path != "/v1/responses":
            return super().answer(path, body)
        self.bodies.append(body)
        is_probe = body["input"] == [{"role": "user", "content": "Hi"}]
        found: dict[str, Any] = made(TEXT) if is_probe else self.found
        return found


def answered(body: dict[str, Any], found: Any, **job: Any) -> tuple[list[Any], dict[str, Any]]:
    """The bodies that a server got, and the record."""
    server = ResponsesServer()
    server.found = found
    try:
        write_jsonl(Path("batch.jsonl"), [{"custom_id": "a", "url": "/v1/responses", "body": body}])
        engine = {"kind": "openai-server", "model": MODEL, "base_url": server.url}
        engine |= {"options": job.pop("options", {})}
        job = {"name": "a", "input": {"path": "batch.jsonl"}, "engine": engine, **job}
        Path("job.toml").write_text(tomlkit.dumps(job))
        batchkit("run", "job.toml", "--fresh")
    finally:
        server.kill()
    (record,) = records()
    return server.bodies, record


def made(*output: Any, **more: Any) -> dict[str, Any]:
    return {"status": "completed", "output": output, "usage": USAGE, "model": MODEL, **more}


def test_each_part_of_a_line_is_sent_in_the_terms_of_the_endpoint() -> None:
    Image.new("RGB", (8, 8)).save("a.png")
    form = {"type": "json_schema", "name": "answer", "schema": {"type": "object"}, "strict": True}
    parts = [
        {"type": "input_text", "text": "tea"},
        {"type": "input_image", "image_url": "a.png", "detail": "low"},
    ]
    items = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": [{"type": "output_text", "text": "wait"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
    ]
    tools = [{"type": "function", **FUNCTION}]
    choice = {"type": "function", "name": "f"}
    asked = {"tools": tools, "tool_choice": choice, "reasoning": {"effort": "low"}, "top_p": 0.5}
    line = {"input": items, "instructions": "be brief", "text": {"format": form}, **asked}
    (body,), _ = answered({**line, "max_output_tokens": 9}, made(TEXT), media={"root": "."})
    image = body["input"][1]["content"][1].pop("image_url")
    assert image.startswith("data:image/png;base64,")
    del parts[1]["image_url"]
    items[1]["content"] = "wait"
    system = {"role": "system", "content": "be brief"}
    assert body == {
        "model": MODEL,
        "store": False,
        "input": [system, *items],
        "text": {"format": form},
        **asked,
        "max_output_tokens": 9,
        "temperature": 0.0,
    }


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (made(TEXT), {"text": "fine", "finish_reason": "stop"}),
        (made({"type": "reasoning", "content": [{"text": "hm"}]}, TEXT), {"reasoning": "hm"}),
        (made({"type": "reasoning", "summary": [{"text": "hm"}]}, TEXT), {"reasoning": "hm"}),
        (made(TEXT, status="incomplete"), {"finish_reason": "length"}),
        (
            made(TEXT, status="incomplete", incomplete_details={"reason": "content_filter"}),
            {"finish_reason": "content_filter"},
        ),
        (made(TEXT, CALL), {"text": "fine", "finish_reason": "tool_calls"}),
        (made(TEXT, usage=None), {"usage": None}),
        (made(status="failed", error={"message": "no"}), {"text": None, "kind": "server"}),
        (made(status="queued"), {"text": None, "kind": "server"}),
        (made(), {"text": None, "kind": "empty"}),
        ({"choices": []}, {"text": None, "kind": "server"}),
    ],
)
def test_an_answer_becomes_a_record_and_a_broken_one_fails(found: Any, expected: Any) -> None:
    _, record = answered({"input": "tea"}, found, retry={"attempts": 1})
    kind = expected.pop("kind", None)
    assert (record["error"] and record["error"]["kind"]) == kind
    assert {name: record.get(name) for name in expected} == expected
    if kind is None and "usage" not in expected:
        assert record["usage"] == {
            "prompt_tokens": 5, "completion_tokens": 4, "reasoning_tokens": 3}  # fmt: skip
    if record["finish_reason"] == "tool_calls":
        function = {"name": "f", "arguments": '{"a": 1}'}
        assert record["tool_calls"] == [{"id": "c", "type": "function", "function": function}]


@pytest.mark.parametrize(
    ("body", "tables"),
    [
        ({"seed": 7}, {}),
        ({"frequency_penalty": 0.5}, {}),
        ({"chat_template_kwargs": {"a": 1}}, {}),
        ({}, {"sampling": {"structured_outputs": {"choice": ["a"]}}}),
        ({}, {"options": {"extra_body": {"a": 1}}}),
        ({}, {"options": {"drop": ["temperature"]}}),
    ],
)
def test_what_a_server_may_not_read_there_is_asked_as_chat(
    body: dict[str, Any], tables: dict[str, Any]
) -> None:
    (sent,), record = answered({"input": "tea", **body}, made(TEXT), **tables)
    assert sent["messages"] == [{"role": "user", "content": "tea"}]
    assert record["text"] == "0 images, asked: tea"
