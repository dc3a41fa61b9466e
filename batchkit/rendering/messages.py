"""Chat messages: as a row holds them, with the names of images; as a request does, with pixels."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from batchkit.errors import RequestError
from batchkit.sources.reader import shown
from batchkit.storage.answers import calls_in_words
from batchkit.types import Content, Request

Message = Mapping[str, Any]

_IMAGE_PARTS = ("image_url", "image", "image_pil")


def loaded(messages: Any, load: Callable[[Any], Any]) -> list[Message]:
    """``messages`` of a row; ``load`` makes the part for the source of each image.

    Raises:
        RequestError: they are not chat messages, or have a part of another type.
    """
    if not isinstance(messages, list) or not messages:
        raise RequestError(f"messages: found {shown(messages)}, expected a list of messages")
    return [_loaded(message, load) for message in messages]


def image_sources(messages: Any) -> list[Any]:
    """The sources of all image parts; a value that is not a chat message has none."""
    return [
        _source_in(part)
        for message in (messages if isinstance(messages, list) else [])
        if isinstance(message, Mapping) and isinstance(message.get("content"), list)
        for part in message["content"]
        if isinstance(part, Mapping) and part.get("type") in _IMAGE_PARTS
    ]


def with_note(request: Request) -> Request | None:
    """``request`` with its note added; None if it has none.

    It is added after the plain prompt, after the user's last text, or else after the last message.
    """
    note, messages = request.note, request.messages or ()
    if not note:
        return None
    if request.prompt is not None:
        return replace(request, prompt=f"{request.prompt}\n{note}")
    of_the_user = [n for n, message in enumerate(messages) if message["role"] == "user"]
    place = of_the_user[-1] if of_the_user else len(messages) - 1
    content, text = messages[place]["content"] or "", f"\n{note}"
    longer = content + text if isinstance(content, str) else [*content, text_part(text)]
    changed = {**messages[place], "content": longer}
    return replace(request, messages=[*messages[:place], changed, *messages[place + 1 :]])


def as_text(request: Request, image: str = "<image>") -> str:
    """The prompt for people, without a chat template, and ``image`` in place of each image."""
    return "\n".join(_lines(request, image))


def _lines(request: Request, image: str) -> Iterator[str]:
    if request.pair is not None:
        yield f"query: {_plain(request.pair.query, image)}"
        yield from (f"document: {_plain(document, image)}" for document in request.pair.documents)
    elif request.messages is None:
        yield request.prompt or ""
    else:
        yield from (
            f"tool: {json.dumps(tool, ensure_ascii=False, default=str)}"
            for tool in request.tools or ()
        )
        yield from (f"{part['role']}: {said(part, image)}" for part in request.messages)


def said(message: Message, image: str) -> str:
    """A message of a request for people: its text and tool calls, and ``image`` for each image."""
    text = _plain(message["content"] or "", image)
    if not message.get("tool_calls"):
        return text
    return " ".join([*filter(None, [text]), *calls_in_words(message)])


def _plain(content: Content, image: str) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", image) for part in content)


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _loaded(message: Any, load: Callable[[Any], Any]) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages: found {shown(message)}, expected role and content")
    content = message.get("content")
    # Parquet gives each message the keys of all, and a template may ask which ones it has.
    message = {key: value for key, value in message.items() if value is not None}
    if "tool_calls" in message:
        message = {**message, "tool_calls": _loaded_calls(message["tool_calls"])}
    if content is None and message["role"] == "assistant":
        return {**message, "content": None}  # as OpenAI has it beside tool calls
    if not isinstance(content, str | list):
        raise RequestError(f"messages: content is {shown(content)}, expected text or parts")
    return (
        message if isinstance(content, str) else {**message, "content": with_parts(content, load)}
    )


def with_parts(content: Content, load: Callable[[Any], Any]) -> Content:
    """A message's ``content``; ``load`` makes the part for the source of each image."""
    return content if isinstance(content, str) else [_loaded_part(part, load) for part in content]


def _loaded_calls(calls: Any) -> list[dict[str, Any]]:
    """Copies, with arguments as text, which is OpenAI's shape: vLLM changes those it gets."""
    if not isinstance(calls, list):
        raise RequestError(f"messages: tool_calls is {shown(calls)}, expected a list")
    copies = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(
                f"messages: tool call {shown(call)}, expected a function with name and arguments"
            )
        arguments = function.get("arguments")
        if isinstance(arguments, Mapping):
            arguments = json.dumps(arguments, ensure_ascii=False, default=str)
        copies.append({**call, "function": {**function, "arguments": arguments}})
    return copies


def _loaded_part(part: Any, load: Callable[[Any], Any]) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return text_part(part["text"])
    if kind in _IMAGE_PARTS:
        return _with_detail(load(_source_in(part)), part)
    raise RequestError(f"messages: part {shown(part)}; known types: text, image_url, image")


def _with_detail(made: Any, part: Mapping[str, Any]) -> Any:
    """``made``, with OpenAI's ``detail`` of the image ``part``, which only servers read."""
    url = part.get("image_url")
    detail = url.get("detail") if isinstance(url, Mapping) else part.get("detail")
    if not isinstance(detail, str):
        return made
    if isinstance(url := made.get("image_url"), Mapping):
        return {**made, "image_url": {**url, "detail": detail}}
    return {**made, "detail": detail}


def _source_in(part: Mapping[str, Any]) -> Any:
    """The source that an image part names."""
    if part["type"] == "image_url":
        url = part.get("image_url")
        return url.get("url") if isinstance(url, Mapping) else url
    image = part.get("image")  # may be an array, which is neither true nor false
    return part.get("image_pil") if image is None else image
