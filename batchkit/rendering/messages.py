"""Chat messages: as a row holds them, with the names of images; as a request does, with pixels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from batchkit.config.terminal import shortened
from batchkit.errors import RequestError
from batchkit.types import Content, Request

Message = Mapping[str, Any]

_IMAGE_PARTS = ("image_url", "image", "image_pil")


def loaded(messages: Any, load: Callable[[Any], Any]) -> list[Message]:
    """``messages`` of a row; ``load`` makes the part for the source of each image.

    Raises:
        RequestError: they are not chat messages, or have a part of another type.
    """
    if not isinstance(messages, list) or not messages:
        raise RequestError(f"messages: found {short(messages)}, expected a list of messages")
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
    content, text = messages[place]["content"], f"\n{note}"
    longer = content + text if isinstance(content, str) else [*content, text_part(text)]
    changed = {**messages[place], "content": longer}
    return replace(request, messages=[*messages[:place], changed, *messages[place + 1 :]])


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def short(value: Any) -> str:
    """``value`` as an error shows it."""
    try:
        text = repr(value)
    except Exception:  # the value's own code runs here
        text = f"({type(value).__name__})"
    return shortened(text)


def _loaded(message: Any, load: Callable[[Any], Any]) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages: found {short(message)}, expected role and content")
    content = message.get("content")
    if not isinstance(content, str | list):
        raise RequestError(f"messages: content is {short(content)}, expected text or parts")
    return (
        message if isinstance(content, str) else {**message, "content": with_parts(content, load)}
    )


def with_parts(content: Content, load: Callable[[Any], Any]) -> Content:
    """A message's ``content``; ``load`` makes the part for the source of each image."""
    return content if isinstance(content, str) else [_loaded_part(part, load) for part in content]


def _loaded_part(part: Any, load: Callable[[Any], Any]) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return text_part(part["text"])
    if kind in _IMAGE_PARTS:
        return load(_source_in(part))
    raise RequestError(f"messages: part {short(part)}; known types: text, image_url, image")


def _source_in(part: Mapping[str, Any]) -> Any:
    """The source that an image part names."""
    if part["type"] == "image_url":
        url = part.get("image_url")
        return url.get("url") if isinstance(url, Mapping) else url
    image = part.get("image")  # may be an array, which is neither true nor false
    return part.get("image_pil") if image is None else image
