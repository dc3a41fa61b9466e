"""Chat messages of a row: checking them, loading their images and clips, and showing them as text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from batchkit.errors import RequestError
from batchkit.sources.reader import shown
from batchkit.storage.lines import calls_in_words
from batchkit.types import CLIPS, Content, Request

Message = Mapping[str, Any]

Load = Callable[[str, Any], Any]
"""A function that loads media. It gets a kind (image, audio, video) and a source, and returns a content part with the
loaded media."""

MEDIA_PARTS = {
    **dict.fromkeys(("image_url", "image", "image_pil"), "image"),
    **dict.fromkeys(("video_url", "video"), "video"),
    **dict.fromkeys(("audio_url", "input_audio", "audio"), "audio"),
}
"""The kind of media for each ``type`` of a content part that has media."""


def loaded(messages: Any, load: Load) -> list[Message]:
    """Return the chat messages of a row, with each image and clip loaded by ``load``.

    Raises:
        RequestError: ``messages`` is not a list of chat messages, or a part has an unknown type.
    """
    if not isinstance(messages, list) or not messages:
        found = f"messages: found {shown(messages)}, expected a list of messages"
        remedy = "; it is text: store the rows as JSON Lines or Parquet, whose cells may be lists"
        raise RequestError(found + remedy * isinstance(messages, str))
    return [_loaded(message, load) for message in messages]


def media_sources(messages: Any, *kinds: str) -> list[Any]:
    """Return the sources of images and clips of these ``kinds`` in ``messages``; [] if they are not chat messages."""
    return [
        _source_in(part)
        for message in (messages if isinstance(messages, list) else [])
        if isinstance(message, Mapping) and isinstance(message.get("content"), list)
        for part in message["content"]
        if isinstance(part, Mapping) and MEDIA_PARTS.get(str(part.get("type")), "") in kinds
    ]


def with_note(request: Request) -> Request | None:
    """Return ``request`` with the text ``request.note`` added to its prompt; None if it has no note.

    The note is added to the end of a plain prompt. In a chat, it is added to the user's last message or, if the user
    has none, to the last message.
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
    """Return a request's prompt as text for people, without a chat template. ``image``: text in place of each image."""
    return "\n".join(_lines(request, image))


def _lines(request: Request, image: str) -> Iterator[str]:
    if request.pair is not None:
        yield f"query: {_plain(request.pair.query, image)}"
        yield from (f"document: {_plain(document, image)}" for document in request.pair.documents)
    elif request.speech is not None:
        yield ", ".join(["(transcribe)", *filter(None, request.speech[:2])])
    elif request.messages is None:
        yield request.prompt or ""
    else:
        yield from (
            f"tool: {json.dumps(tool, ensure_ascii=False, default=str)}"
            for tool in request.tools or ()
        )
        yield from (f"{part['role']}: {said(part, image)}" for part in request.messages)


def said(message: Message, image: str) -> str:
    """Return a message as text for people: its text and tool calls, with ``image`` in place of each image."""
    text = _plain(message["content"] or "", image)
    if not message.get("tool_calls"):
        return text
    return " ".join([*filter(None, [text]), *calls_in_words(message)])


def _plain(content: Content, image: str) -> str:
    if isinstance(content, str):
        return content
    return "".join(_part_in_words(part, image) for part in content)


def _part_in_words(part: Mapping[str, Any], image: str) -> str:
    kind = MEDIA_PARTS.get(part["type"], "")
    return str(part.get("text", image.replace("image", kind) if kind in CLIPS else image))


def image_part(image: Any) -> dict[str, Any]:
    return {"type": "image_pil", "image_pil": image}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _loaded(message: Any, load: Load) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(
            f"messages: found {shown(message)}, expected an object with role and content"
        )
    # Refused, because many chat templates silently leave out messages with a role that they do not know.
    if message["role"] in ("human", "gpt"):
        raise RequestError(f"messages: role is {message['role']!r}; write user or assistant")
    content = message.get("content")
    # In Parquet, each message has the keys of all messages. A chat template may test which keys exist, so null ones are
    # removed.
    message = {key: value for key, value in message.items() if value is not None}
    if "tool_calls" in message:
        message = {**message, "tool_calls": _loaded_calls(message["tool_calls"])}
    if content is None and message["role"] == "assistant":
        return {**message, "content": None}  # OpenAI's form of a message with only tool calls
    if not isinstance(content, str | list):
        raise RequestError(
            f"messages: content is {shown(content)}, expected a text or a list of parts"
        )
    return (
        message if isinstance(content, str) else {**message, "content": with_parts(content, load)}
    )


def placed(
    text: str, places: Mapping[str, str], media: Mapping[str, list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Split a prompt's ``text`` into content parts, with each image or clip at its place mark.

    - ``places``: the text that marks the place of an image or a clip, by kind.
    - ``media``: the content parts with images and clips, by kind and in order. Parts that are used are removed from
      these lists.

    Raises:
        RequestError: the text has more marks than there are images or clips.
    """
    kinds = {mark: kind for kind, mark in places.items()}
    pieces = re.split(f"({'|'.join(map(re.escape, kinds))})", text) if kinds else [text]
    parts = []
    for piece in pieces:
        if piece not in kinds:
            parts += [text_part(piece)] if piece else []
        elif media[kind := kinds[piece]]:
            parts.append(media[kind].pop(0))
        else:
            raise RequestError(
                f"prompt.user: has more {{{{ {kind} }}}} than prompt.{kind}s has files;"
                f" write {{{{ row.{kind} }}}} for a column of that name"
            )
    return parts


def with_parts(content: Content, load: Load) -> Content:
    """Return the ``content`` of a message, with each image and clip loaded by ``load``."""
    return content if isinstance(content, str) else [_loaded_part(part, load) for part in content]


def _loaded_calls(calls: Any) -> list[dict[str, Any]]:
    """Return copies of tool calls with their arguments as text (OpenAI's shape). These are copies, because vLLM
    modifies the tool calls that it gets."""
    if not isinstance(calls, list):
        raise RequestError(f"messages: tool_calls is {shown(calls)}, expected a list")
    copies = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(
                f"messages: found the tool call {shown(call)}, expected"
                ' {"function": {"name": …, "arguments": …}}'
            )
        arguments = function.get("arguments")
        if isinstance(arguments, Mapping):
            arguments = json.dumps(arguments, ensure_ascii=False, default=str)
        copies.append({**call, "function": {**function, "arguments": arguments}})
    return copies


def _loaded_part(part: Any, load: Load) -> Any:
    found = part.get("type") if isinstance(part, Mapping) else None
    if found == "text" and isinstance(part.get("text"), str):
        return text_part(part["text"])
    if kind := MEDIA_PARTS.get(found if isinstance(found, str) else ""):
        return _with_detail(load(kind, _source_in(part)), part)
    raise RequestError(
        f'messages: this part can\'t be used: {shown(part)}; a part needs a "type" (text, {", ".join(MEDIA_PARTS)})'
        " and its content"
    )


def _with_detail(made: Any, part: Mapping[str, Any]) -> Any:
    """Return the loaded image part ``made`` with the key ``detail`` of the original ``part``, if it has one. Only
    servers use this key."""
    url = part.get("image_url")
    detail = url.get("detail") if isinstance(url, Mapping) else part.get("detail")
    if not isinstance(detail, str):
        return made
    if isinstance(url := made.get("image_url"), Mapping):
        return {**made, "image_url": {**url, "detail": detail}}
    return {**made, "detail": detail}


def _source_in(part: Mapping[str, Any]) -> Any:
    """Return the path, URL or bytes in a content ``part`` of an image or a clip."""
    kind = part["type"]
    if kind == "input_audio":
        sound = part.get("input_audio")
        data = sound.get("data") if isinstance(sound, Mapping) else None
        return f"data:;base64,{data}" if isinstance(data, str) else None
    if kind.endswith("_url"):
        url = part.get(kind)
        return url.get("url", url.get("file_id")) if isinstance(url, Mapping) else url
    source = part.get(kind)  # may be an array, which is neither true nor false
    return part.get("image_pil" if kind == "image" else "image") if source is None else source
