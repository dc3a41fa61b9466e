"""Conversion of a batch line for ``/v1/responses`` to one for ``/v1/chat/completions``.

https://platform.openai.com/docs/api-reference/responses/create defines the line's body. Only the parts that need no
memory between requests are supported: messages with text and images, functions and their outputs, and a text format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from batchkit.errors import RequestError
from batchkit.sources.reader import shown

# Refused keys: they need a server with memory or OpenAI's own server, a record can't store their result, or they belong
# to other endpoints.
_REFUSED = (
    *("previous_response_id", "conversation", "background", "stream", "prompt"),
    *("max_tool_calls", "top_logprobs", "context_management", "moderation"),
    *(
        "messages",
        "max_tokens",
        "max_completion_tokens",
        "response_format",
        "reasoning_effort",
        "n",
    ),
)
_READ = ("input", "instructions", "max_output_tokens", "text", "tools", "tool_choice", "reasoning")
_IGNORED = ("truncation", "prompt_cache_options", "include")
# OpenAI's models answer with it if they hide their reasoning. Clients ask for it from every model.
_INCLUDED = ["reasoning.encrypted_content"]
_TEXT_PARTS = ("input_text", "output_text", "text")


def as_chat(body: Any) -> dict[str, Any]:
    """Return the equivalent body for ``/v1/chat/completions``.

    Raises:
        RequestError: the body has unsupported keys; one message names all of them.
    """
    if not isinstance(body, Mapping):
        raise RequestError(f"body: found {type(body).__name__}, expected a JSON object")
    if found := [*_refused(body)]:
        raise RequestError(
            f"body: these keys of /v1/responses are not supported: {', '.join(found)}; leave them out"
        )
    others = {n: v for n, v in body.items() if n not in (*_READ, *_REFUSED, *_IGNORED)}
    chat: dict[str, Any] = {**others, "messages": _messages(body)}
    if (most := body.get("max_output_tokens")) is not None:
        chat["max_completion_tokens"] = most
    if (form := (body.get("text") or {}).get("format")) is not None:
        chat["response_format"] = _response_format(form)
    if tools := body.get("tools"):
        functions = [{n: v for n, v in tool.items() if n != "type"} for tool in tools]
        chat["tools"] = [{"type": "function", "function": function} for function in functions]
    if (choice := body.get("tool_choice")) is not None:
        chat["tool_choice"] = _choice(choice)
    if (effort := (body.get("reasoning") or {}).get("effort")) is not None:
        chat["reasoning_effort"] = effort
    return chat


def _refused(body: Mapping[str, Any]) -> Iterator[str]:
    yield from (name for name in _REFUSED if body.get(name))
    if body.get("include") not in (None, [], _INCLUDED):
        yield f"include {shown(body['include'])}"
    if body.get("truncation") not in (None, "disabled"):
        yield f"truncation {shown(body['truncation'])} (retry.on_too_long cuts long prompts)"
    for name in ("text", "reasoning"):
        if not isinstance(body.get(name), Mapping | None):
            yield f"{name} {shown(body[name])}"
    text, reasoning = body.get("text"), body.get("reasoning")
    if isinstance(text, Mapping):
        yield from (f"text.{name}" for name in text if name != "format" and text[name])
    if isinstance(reasoning, Mapping):
        yield from (
            f"reasoning.{name}" for name in reasoning if name != "effort" and reasoning[name]
        )
    tools = body.get("tools") or ()
    kinds = (
        [_type_of(tool) for tool in tools] if isinstance(tools, list | tuple) else [shown(tools)]
    )
    yield from (f"tools ({kind})" for kind in dict.fromkeys(kinds) if kind != "function")
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping) and choice.get("type") != "function":
        yield f"tool_choice ({_type_of(choice)})"


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    instructions, found = body.get("instructions"), body.get("input")
    if not isinstance(instructions, str | None):
        raise RequestError(f"body.instructions: found {shown(instructions)}, expected a text")
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(found, str):
        return [*messages, {"role": "user", "content": found}]
    if not isinstance(found, list) or not found:
        raise RequestError(
            f"body.input: found {shown(found)}, expected a text or a list of messages"
        )
    for number, item in enumerate(found):
        made = _message(item, f"body.input[{number}]")
        # In /v1/responses each call is a separate item; in chat, calls are part of the assistant's message before them.
        if "tool_calls" in made and messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).extend(made["tool_calls"])
        else:
            messages.append(made)
    return messages


def _message(item: Any, place: str) -> dict[str, Any]:
    kind = item.get("type") or "message" if isinstance(item, Mapping) else None
    if kind == "message" and isinstance(item.get("role"), str):
        return {"role": item["role"], "content": _content(item.get("content"), f"{place}.content")}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        content = _content(item.get("output"), f"{place}.output")
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
    raise RequestError(
        f"{place}: found {shown(item)}, expected a message (role and content), a function_call or a"
        " function_call_output"
    )


def _content(content: Any, place: str) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{place}: found {shown(content)}, expected a text or a list of parts")
    return [_part(part, place) for part in content]


def _part(part: Any, place: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _TEXT_PARTS and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    source = part.get("image_url") or part.get("file_id") if kind == "input_image" else None
    if isinstance(source, str):
        detail = {"detail": part["detail"]} if part.get("detail") else {}
        return {"type": "image_url", "image_url": {"url": source, **detail}}
    raise RequestError(
        f"{place}: found the part {shown(part)}, expected input_text, output_text, or input_image with an image_url"
        " or a file_id"
    )


def _response_format(form: Any) -> dict[str, Any]:
    """Return the ``response_format`` of chat for the text format ``form``. In chat, the name and the schema are one
    level deeper."""
    kind = form.get("type") if isinstance(form, Mapping) else None
    if kind in ("text", "json_object"):
        return {"type": kind}
    if kind != "json_schema" or not isinstance(form.get("schema"), Mapping):
        raise RequestError(
            f"body.text.format: found {shown(form)}, expected the type text, json_object, or json_schema with a schema"
        )
    return {"type": kind, "json_schema": {n: v for n, v in form.items() if n != "type"}}


def _choice(choice: Any) -> Any:
    if not isinstance(choice, Mapping):
        return choice
    return {"type": "function", "function": {"name": choice.get("name")}}


def _type_of(tool: Any) -> str:
    return str(tool.get("type")) if isinstance(tool, Mapping) else shown(tool)
