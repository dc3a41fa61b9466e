"""Parts shared by the endpoints of OpenAI's API: JSON bodies, error responses, and the list of models.

See https://platform.openai.com/docs/api-reference. ``vllm serve`` and llama.cpp's server extend this API. No code here
touches the network.
"""

from __future__ import annotations

import base64
import io
import re
import time
import wave
from collections.abc import Mapping, Sequence
from email.utils import mktime_tz, parsedate_tz
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from batchkit.config.terminal import plain
from batchkit.errors import PromptTooLongError, RequestError
from batchkit.rendering.messages import loaded, with_parts
from batchkit.storage.plain_json import encoded as as_json
from batchkit.storage.plain_json import parsed, valid
from batchkit.storage.schema import is_count
from batchkit.types import VideoFile

if TYPE_CHECKING:
    from PIL.Image import Image

    from batchkit.types import Audio

# Error codes, types and parameters for a prompt that is too long: OpenAI's, llama.cpp's, vLLM's.
_TOO_LONG = ("context_length_exceeded", "exceed_context_size_error", "input_tokens", "input_text")
# The same error as text; the first form is vLLM's for a prompt with images, which has no code.
_COUNTS = (
    re.compile(
        r"Input length \((?P<n>\d+)\) exceeds model's maximum context length \((?P<most>\d+)"
    ),
    re.compile(r"maximum context length is (?P<most>\d+) tokens.* resulted in (?P<n>\d+) tokens"),
)
_NO_SUCH_MODEL = ("model_not_found", "NotFoundError", "not_found_error", "model")
_NO_MONEY = ("insufficient_quota", "billing_hard_limit_reached")
_LONGEST_MESSAGE = 1000


class ShapeError(ValueError):
    """An answer that does not have the API's format."""


class Refusal(NamedTuple):
    """An error response: the HTTP status and the server's message.

    - ``signs``: the error's code, type and parameter, if the server sent them.
    - ``prompt_tokens``, ``max_model_len``: the prompt's token count and the server's limit; None if not reported.
    """

    status: int
    message: str
    signs: frozenset[str] = frozenset()
    prompt_tokens: int | None = None
    max_model_len: int | None = None

    @property
    def is_too_long(self) -> bool:
        return not self.signs.isdisjoint(_TOO_LONG) or (
            self.prompt_tokens is not None or any(words.search(self.message) for words in _COUNTS)
        )

    @property
    def is_of_the_model(self) -> bool:
        return self.status == 404 and not self.signs.isdisjoint(_NO_SUCH_MODEL)

    @property
    def is_out_of_money(self) -> bool:
        return not self.signs.isdisjoint(_NO_MONEY)

    def __str__(self) -> str:
        return f"{self.status}: {self.message}" if self.message else str(self.status)


def encoded(body: Mapping[str, Any]) -> bytes:
    """Return the body as JSON, with images as PNG in data: URIs. Raises RequestError if JSON can't represent a
    value."""
    try:
        return orjson.dumps(_with_images(body), option=orjson.OPT_NON_STR_KEYS)
    except (TypeError, OSError, ValueError) as error:
        raise RequestError(f"the request can't be written as JSON: {error}") from error


def refusal_of(status: int, content: bytes) -> Refusal:
    """Read the refusal from the body of an error response, in any of the formats that servers use."""
    try:
        body = parsed(content)
    except ValueError:
        return Refusal(status, in_words(content[: 4 * _LONGEST_MESSAGE].decode("utf-8", "replace")))
    found = body.get("error", body) if isinstance(body, Mapping) else body
    if not isinstance(found, Mapping):
        return Refusal(status, in_words(found))
    message = in_words(found.get("message") or found.get("detail") or found)
    signs = (found.get(name) for name in ("code", "type", "param"))
    known = frozenset(sign for sign in signs if isinstance(sign, str))
    return Refusal(status, message, known, *_counts(found, message))


def in_words(error: Any) -> str:
    """Return a server's error message as one line of at most 1,000 characters, without terminal control characters."""
    text = valid(error) if isinstance(error, str) else as_json(error).decode()
    return plain(" ".join(text.split()))[:_LONGEST_MESSAGE]


def _counts(error: Mapping[str, Any], message: str) -> tuple[int | None, int | None]:
    """Return the prompt's token count and the server's limit, or None for both if they are not reported."""
    pairs = [(error.get("n_prompt_tokens"), error.get("n_ctx"))]  # llama.cpp
    found = (pattern.search(message) for pattern in _COUNTS)
    pairs += [(int(words["n"]), int(words["most"])) for words in found if words]
    for tokens, most in pairs:
        if is_count(tokens) and is_count(most) and tokens:
            return tokens, most
    return None, None


def too_long(refusal: Refusal, max_model_len: int | None) -> PromptTooLongError:
    """Return the refusal as a PromptTooLongError, with the token counts that truncation needs, as far as they are
    known."""
    error = PromptTooLongError(refusal.message)
    error.prompt_tokens = refusal.prompt_tokens
    error.max_model_len = refusal.max_model_len or max_model_len
    return error


def max_model_len(model: Mapping[str, Any]) -> int | None:
    """Return the context length in a model's entry of the model list: vLLM's field, or llama.cpp's context per slot."""
    most = model.get("max_model_len") or _meta(model).get("n_ctx")
    return most if is_count(most) and most else None


def known_of(models: Sequence[Mapping[str, Any]], name: str | None) -> dict[str, Any]:
    """Return the properties of the model ``name`` according to a server's list of models.

    If no entry has this name and the list has only one entry, that entry is used, because many servers accept any name.
    vLLM lists the model's folder (``root``); llama.cpp lists the model's size once the model is loaded.
    """
    named = [model for model in models if model.get("id") == name] or models
    if len(named) != 1:
        return {}
    (model,) = named
    known = {**_meta(model), "id": model.get("id"), "root": model.get("root")}
    keys = ("id", "root", "n_params", "n_vocab", "size")
    return {key: known[key] for key in keys if known.get(key) is not None}


def _meta(model: Mapping[str, Any]) -> Mapping[str, Any]:
    meta = model.get("meta")
    return meta if isinstance(meta, Mapping) else {}


def retry_after_s(value: str | None) -> float | None:
    """Return the value of a Retry-After header (a number or a date) in seconds; None if it is missing or invalid."""
    try:
        return max(0.0, float(value or ""))
    except ValueError:
        date = parsedate_tz(value or "")
    return None if date is None else max(0.0, mktime_tz(date) - time.time())


def _with_images(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``body`` with the images, sound and videos of its messages, or of its query and documents, in OpenAI's
    format."""

    def part(kind: str, found: Any) -> dict[str, Any]:
        if kind == "image":
            return {"type": "image_url", "image_url": {"url": _data_uri(found)}}
        if kind == "audio":
            return {"type": "input_audio", "input_audio": {"data": _wav(found), "format": "wav"}}
        if not isinstance(found, VideoFile):
            raise RequestError("only a video's file can be sent to a server, not its frames")
        data = base64.b64encode(found.data).decode()
        return {"type": "video_url", "video_url": {"url": f"data:{found.type};base64,{data}"}}

    def side(content: Any) -> Any:
        if isinstance(content, str):
            return content
        return {"content": with_parts(content["content"], part)}

    made = dict(body)
    if "messages" in body:
        made["messages"] = loaded(list(body["messages"]), part)
    if "documents" in body:
        made["query"] = side(body["query"])
        made["documents"] = [side(document) for document in body["documents"]]
    return made


def _wav(sound: Audio) -> str:
    """Return a base64 WAV with 16-bit samples, which every server can read."""
    file = io.BytesIO()
    with wave.open(file, "wb") as wav:
        wav.setparams((1, 2, sound.sample_rate, 0, "NONE", ""))
        wav.writeframes((sound.samples.clip(-1, 1) * 32767).round().astype("<i2").tobytes())
    return base64.b64encode(file.getbuffer()).decode()


def _data_uri(image: Image) -> str:
    png = io.BytesIO()
    image.save(png, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(png.getbuffer()).decode()
