"""Bodies of OpenAI batch lines for ``/v1/responses``."""

from __future__ import annotations

from typing import Any

import pytest

from batchkit.errors import RequestError
from batchkit.rendering.body import in_chat_terms, sampling_of
from batchkit.rendering.responses import as_chat

USER = {"role": "user", "content": "tea"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def text(kind: str, said: str = "tea") -> dict[str, Any]:
    return {"type": kind, "text": said}


def image(**more: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": "a.png", **more}


MESSAGES: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    ({"input": "tea"}, [USER]),
    ({"input": "tea", "instructions": "be brief"}, [{"role": "system", "content": "be brief"}, USER]),
    ({"input": [USER], "instructions": None}, [USER]),
    ({"input": [{"type": "message", **USER}]}, [USER]),
    (
        {"input": [{"role": "user", "content": [text("input_text"), image(), image(detail="low")]}]},
        [{"role": "user", "content": [
            text("text"),
            {"type": "image_url", "image_url": {"url": "a.png"}},
            {"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}},
        ]}],
    ),
    (
        {"input": [{"role": "developer", "content": "x"}, USER,
                   {"role": "assistant", "content": [text("output_text", "hot")]}, USER]},
        [{"role": "developer", "content": "x"}, USER,
         {"role": "assistant", "content": [text("text", "hot")]}, USER],
    ),
    (
        {"input": [USER, CALL, CALL, {"type": "function_call_output", "call_id": "c", "output": "1"}]},
        [USER, {"role": "assistant", "content": None, "tool_calls": [CALLED, CALLED]},
         {"role": "tool", "tool_call_id": "c", "content": "1"}],
    ),
    (
        {"input": [USER, {"role": "assistant", "content": "wait"}, CALL]},
        [USER, {"role": "assistant", "content": "wait", "tool_calls": [CALLED]}],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("body", "messages"), MESSAGES)
def test_the_input_becomes_chat_messages(
    body: dict[str, Any], messages: list[dict[str, Any]]
) -> None:
    assert as_chat(body)["messages"] == messages


@pytest.mark.parametrize(
    ("body", "sampling"),
    [
        ({}, {}),
        ({"max_output_tokens": 7, "temperature": 0.5, "top_p": 0.9},
         {"max_tokens": 7, "temperature": 0.5, "top_p": 0.9}),
        ({"text": {"format": {"type": "text"}}, "truncation": "disabled", "store": True}, {}),
        ({"text": {"format": {"type": "json_object"}}},
         {"structured_outputs": {"json_object": True}}),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}},
         {"structured_outputs": {"json": SCHEMA}}),
        ({"seed": 3, "top_k": 4, "user": "me", "metadata": {"a": "b"}}, {"seed": 3, "top_k": 4}),
        (dict.fromkeys(["temperature", "text", "tools", "stream", "truncation", "reasoning"]), {}),
        ({"stream": False, "background": False, "include": [], "tools": []}, {}),
        ({"include": ["reasoning.encrypted_content"]}, {}),
    ],
)  # fmt: skip
def test_parameters_become_those_of_sampling(
    body: dict[str, Any], sampling: dict[str, Any]
) -> None:
    assert sampling_of(as_chat({"model": "m", "input": "tea", **body})) == sampling


def test_functions_and_the_effort_become_those_of_chat() -> None:
    chosen = {"type": "function", "name": "f"}
    body = {"input": "tea", "tools": [{"type": "function", **FUNCTION}], "tool_choice": chosen}
    chat = as_chat({**body, "parallel_tool_calls": False, "reasoning": {"effort": "low"}})
    del chat["messages"]
    assert chat == {
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
    }


ALL_AT_ONCE = (
    "supported: conversation, max_tool_calls, truncation 'auto' (retry.on_too_long cuts long prompts),"
    " tools (mcp), tools (3), tool_choice (web_search); leave them out"
)
REFUSED: list[tuple[Any, str]] = [
    ("tea", "body: found str, expected a JSON object"),
    ({}, "body.input: found None, expected a text or a list of messages"),
    ({"input": []}, "body.input: found [], expected"),
    ({"input": "a", "instructions": ["b"]}, "body.instructions: found ['b'], expected a text"),
    ({"input": "a", "previous_response_id": "r"}, "supported: previous_response_id; leave"),
    ({"input": "a", "stream": True, "background": True}, "supported: background, stream; leave"),
    ({"input": "a", "tools": [{"type": "web_search"}]}, "supported: tools (web_search); leave"),
    (
        {"input": "a", "tools": [{"type": "function"}, {"type": "mcp"}, {"type": "mcp"}, 3],
         "conversation": "c", "truncation": "auto", "max_tool_calls": 2,
         "tool_choice": {"type": "web_search"}},
        ALL_AT_ONCE,
    ),
    ({"input": "a", "tools": 3}, "supported: tools (3); leave"),
    ({"input": "a", "text": "x"}, "supported: text 'x'; leave"),
    ({"input": "a", "text": {"verbosity": "low"}}, "supported: text.verbosity; leave"),
    ({"input": "a", "reasoning": {"summary": "auto"}}, "supported: reasoning.summary; leave"),
    ({"input": "a", "prompt": {"id": "p"}}, "supported: prompt; leave"),
    ({"input": "a", "include": ["x"]}, "supported: include ['x']; leave"),
    ({"input": "a", "messages": [USER]}, "supported: messages; leave"),
    ({"input": "a", "max_tokens": 3}, "supported: max_tokens; leave"),
    ({"input": "a", "text": {"format": {"type": "xml"}}}, "body.text.format: found {'type': 'xml'}"),
    ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "json_schema with a schema"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "body.input[0]: found"),
    ({"input": [USER, "tea"]}, "body.input[1]: found 'tea', expected a message"),
    ({"input": [{"role": "user"}]}, "body.input[0].content: found None"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "part {'type': 'input_file'}"),
    ({"input": [{"role": "user", "content": [image(image_url=None)]}]}, "an image_url"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "message"), REFUSED)
def test_what_is_not_supported_is_refused_in_one_line(body: Any, message: str) -> None:
    with pytest.raises(RequestError) as refused:
        as_chat(body)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("url", ["/v1/responses", "https://x/v1/responses/"])
def test_only_lines_for_responses_are_read_so(url: str) -> None:
    fields = {"url": url, "body": {"input": "tea"}, "custom_id": "a"}
    assert in_chat_terms(fields) == {**fields, "body": {"messages": [USER]}}
    for other in (None, "/v1/chat/completions", "/v1/embeddings", 3):
        assert in_chat_terms({**fields, "url": other}) == {**fields, "url": other}
