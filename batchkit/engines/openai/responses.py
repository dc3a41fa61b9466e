"""The endpoint ``/responses`` of OpenAI's API, for batch lines that name it.

https://platform.openai.com/docs/api-reference/responses. Nothing is kept on the server (``store``). Nothing here
touches the network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from batchkit.engines.openai.api import ShapeError, in_words
from batchkit.engines.openai.chat import Chat, as_shape, json_form, usage_in
from batchkit.storage.schema import choice_of
from batchkit.types import Completion, Request

# What every server that has the endpoint reads, by the names of vllm.SamplingParams.
_SAMPLING = ("max_tokens", "temperature", "top_p", "structured_outputs", "reasoning_effort")


class _Part(msgspec.Struct):
    text: str = ""


class _Item(msgspec.Struct):
    """Of a message the ``content``, of a call the rest."""

    type: str = ""
    content: list[_Part] | None = None
    summary: list[_Part] | None = None
    call_id: str | None = None
    name: Any = None
    arguments: Any = None


class _Answer(msgspec.Struct):
    output: list[_Item]
    status: str = "completed"
    incomplete_details: Any = None
    usage: Any = None
    error: Any = None


class Responses(Chat):
    """``/responses``. Only for requests that it can state: ``takes`` says which."""

    def takes(self, request: Request) -> bool:
        """Whether all servers that have the endpoint would read every part of ``request``."""
        given = {name for name, value in request.sampling.items() if value is not None}
        kwargs = {**self._chat_template_kwargs, **request.chat_template_kwargs}
        form = request.sampling.get("structured_outputs")
        return (
            request.messages is not None
            and given <= {*_SAMPLING}
            and kwargs.keys() <= {"reasoning_effort"}
            and (form is None or json_form(form) is not None)
            and not self._drop
        )

    def url(self, base_url: str, request: Request) -> str:
        return f"{base_url}/responses"

    def body_of(self, request: Request) -> dict[str, Any]:
        chat = super().body_of(request)
        body = {"model": chat["model"], "store": False, "input": [*_items(chat["messages"])]}
        renamed = {"max_tokens": "max_output_tokens"}
        same = ("max_tokens", "temperature", "top_p", "parallel_tool_calls")
        body |= {renamed.get(name, name): chat[name] for name in same if name in chat}
        if (form := chat.get("response_format")) is not None:
            body["text"] = {"format": {"type": form["type"], **form.get("json_schema", {})}}
        if (effort := chat.get("reasoning_effort")) is not None:
            body["reasoning"] = {"effort": effort}
        if (tools := chat.get("tools")) is not None:
            body["tools"] = [{"type": "function", **tool["function"]} for tool in tools]
        if (choice := chat.get("tool_choice")) is not None:
            is_named = isinstance(choice, Mapping)
            body["tool_choice"] = {"type": "function", **choice["function"]} if is_named else choice
        return body

    def completion_of(self, request: Request, answer: Any, latency_s: float, n: int) -> Completion:
        found = as_shape(answer, _Answer)
        if found.error or found.status not in ("completed", "incomplete"):
            said = f": {in_words(found.error)}" if found.error else ""
            raise ShapeError(f"the answer is incomplete: its status is {found.status}{said}")
        calls = [
            {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
            for item in found.output
            if item.type == "function_call"
        ]
        reason = "length" if found.status == "incomplete" else "tool_calls" if calls else "stop"
        if (why := _reason_in(found.incomplete_details)) == "content_filter":
            reason = why
        thought = _text_of(found.output, "reasoning")
        usage = usage_in(found.usage, "input_tokens", "output_tokens")
        choice = choice_of(_text_of(found.output, "message"), reason, None, thought, calls)
        return Completion(request, [choice], usage, latency_s)


def _items(messages: Any) -> Iterator[dict[str, Any]]:
    """Chat messages as the API's items; images are still PIL's."""
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            call_id = message.get("tool_call_id")
            yield {"type": "function_call_output", "call_id": call_id, "output": _joined(content)}
            continue
        if content is not None:
            parts = _joined(content) if role == "assistant" else _parts(content)
            yield {"role": role, "content": parts}
        for call in message.get("tool_calls") or ():
            yield {"type": "function_call", "call_id": call.get("id"), **call["function"]}


def _parts(content: Any) -> Any:
    if isinstance(content, str):
        return content
    return [
        {"type": "input_text", "text": part["text"]}
        if part["type"] == "text"
        else {**part, "type": "input_image"}
        for part in content
    ]


def _joined(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def _text_of(items: list[_Item], kind: str) -> str:
    """Of all items of a ``kind``; of reasoning without content, the summary."""
    found = (item.content or item.summary or () for item in items if item.type == kind)
    return "".join(part.text for parts in found for part in parts)


def _reason_in(details: Any) -> Any:
    return details.get("reason") if isinstance(details, Mapping) else None
