"""OpenAI's chat/completions API: writes requests, and reads answers and refusals.

https://platform.openai.com/docs/api-reference/chat, with the fields that `vllm serve` and
llama.cpp's server add to it. Nothing here touches the network.
"""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from time import time
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from batchkit.config.suggest import did_you_mean
from batchkit.errors import PromptTooLongError, RequestError
from batchkit.rendering.messages import loaded, with_parts
from batchkit.storage.plain_json import encoded as as_json
from batchkit.storage.plain_json import parsed, valid
from batchkit.storage.schema import choice_of, is_count, usage_of
from batchkit.types import BROKEN_OFF, Choice, Completion, Content, Request, Usage

if TYPE_CHECKING:
    from PIL.Image import Image

# Names of vllm.SamplingParams that the API has, OpenAI's own or added by `vllm serve`.
SAMPLING = (
    "max_tokens",
    "temperature",
    "top_p",
    "n",
    "stop",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "reasoning_effort",
    "top_k",
    "min_p",
    "repetition_penalty",
    "repetition_detection",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "bad_words",
    "allowed_token_ids",
    "logprob_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "structured_outputs",
    "thinking_token_budget",
    "truncate_prompt_tokens",
)
# Error codes, types and parameters for a prompt that is too long: OpenAI's, llama.cpp's, vLLM's.
_TOO_LONG = ("context_length_exceeded", "exceed_context_size_error", "input_tokens", "input_text")
# The same in words: the first is vLLM's for a prompt with images, which has no code.
_COUNTS = (
    re.compile(
        r"Input length \((?P<n>\d+)\) exceeds model's maximum context length \((?P<most>\d+)"
    ),
    re.compile(r"maximum context length is (?P<most>\d+) tokens.* resulted in (?P<n>\d+) tokens"),
)
PAIR = frozenset(["query", "documents", "text_1", "text_2"])
"""Names that hold what is compared; text, or an object with ``content``."""
_NO_SUCH_MODEL = ("model_not_found", "NotFoundError", "not_found_error", "model")
_NO_MONEY = ("insufficient_quota", "billing_hard_limit_reached")
_LONGEST_MESSAGE = 1000


class ShapeError(ValueError):
    """An answer that is not in the API's format."""


class Refusal(NamedTuple):
    """An error response: the HTTP status, and what the server says about it."""

    status: int
    message: str
    signs: frozenset[str] = frozenset()
    """Its code, type and parameter, those that it has."""
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


def path_of(request: Request) -> str:
    """The request's path below the base URL."""
    return "/completions" if request.messages is None else "/chat/completions"


def body_of(
    request: Request, *, model: str, chat_template_kwargs: Mapping[str, Any], drop: Sequence[str]
) -> dict[str, Any]:
    """The request in the API's terms; its images are still PIL's (``encoded`` converts them).

    Raises:
        RequestError: a sampling parameter that the API does not have.
    """
    body: dict[str, Any] = {"model": model}
    effort: dict[str, Any] = {}
    if request.messages is None:
        body["prompt"] = request.prompt
    else:
        body["messages"] = request.messages
        body |= _tools(request)
        own = {**chat_template_kwargs, **request.chat_template_kwargs}
        if request.chat_template_kwargs.get("reasoning_effort") is not None:
            effort["reasoning_effort"] = own.pop("reasoning_effort")
        if own:
            body["chat_template_kwargs"] = own
    body |= _sampling(request.sampling, is_chat=request.messages is not None) | effort
    return {name: value for name, value in body.items() if name not in drop}


def _tools(request: Request) -> dict[str, Any]:
    if request.tools is None:
        return {}
    found = {
        "tools": request.tools,
        "tool_choice": request.tool_choice,
        "parallel_tool_calls": request.parallel_tool_calls,
    }
    return {name: value for name, value in found.items() if value is not None}


def pair_of(request: Request, query: str = "query", documents: str = "documents") -> dict[str, Any]:
    """The two sides of the request's pair under these names; their images are still PIL's."""

    def side(content: Content) -> Any:
        return content if isinstance(content, str) else {"content": content}

    if request.pair is None:
        raise RequestError("nothing to score: the row has no query with documents")
    return {
        query: side(request.pair.query),
        documents: [side(document) for document in request.pair.documents],
    }


def encoded(body: Mapping[str, Any]) -> bytes:
    """The body as JSON, its images as PNG in data: URIs.

    Raises:
        RequestError: it has a value that JSON can't represent.
    """
    try:
        return orjson.dumps(
            _with_images(body, lambda image: {"url": _data_uri(image)}),
            option=orjson.OPT_NON_STR_KEYS,
        )
    except (TypeError, OSError, ValueError) as error:
        raise RequestError(f"can't be sent: {error}") from error


def shown(request: Request) -> str:
    """The prompt for people: tools and messages, or the pair, as JSON, with the size in place of each
    image."""
    if request.prompt is not None:
        return request.prompt
    parts = pair_of(request) if request.pair else {"messages": request.messages or []}
    found = {
        **_tools(request),
        **_with_images(parts, lambda image: f"<{image.width}x{image.height} PNG>"),
    }
    shown = found["messages"] if found.keys() == {"messages"} else found
    return orjson.dumps(shown, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS).decode()


def completion_of(request: Request, answer: Any, latency_s: float, n: int) -> Completion | None:
    """The server's answer; None if it is not in OpenAI's shape.

    It must have the ``n`` choices that were requested (0: not known), or one: some servers ignore
    ``n``.
    """
    try:
        found = answer["choices"]
        places = [choice.get("index") for choice in found]
        if all(place is None for place in places):
            places = list(range(len(found)))
        are_all = n in (0, len(found)) and sorted(places) == list(range(len(found)))
        if not are_all and sorted(places) != [0] and (len(found) > 1 or n > 1):
            return None
        ordered = sorted(zip(places, found, strict=True), key=lambda placed: placed[0] or 0)
        choices = [_choice(choice) for _, choice in ordered]
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return Completion(request, choices, _usage(answer), latency_s) if choices else None


def failure_in(answer: Mapping[str, Any], *, one_will_do: bool = False) -> str | None:
    """What went wrong, if an answer with choices reports that a text of it is incomplete, or each of
    them if ``one_will_do``."""
    failures = [
        (f"finish_reason is {_reason(choice)}", choice.get("error"))
        for choice in answer["choices"]
        if choice.get("error") or _reason(choice) in BROKEN_OFF
    ]
    if one_will_do and len(failures) < len(answer["choices"]):
        failures = []
    if answer.get("error"):
        failures.append(("the answer has an error", answer["error"]))
    return (
        "; ".join(f"{how}: {in_words(error)}" if error else how for how, error in failures) or None
    )


def refusal_of(status: int, content: bytes) -> Refusal:
    """The refusal in an error's body, in any of the shapes that servers use."""
    try:
        body = parsed(content)
    except ValueError:
        text = " ".join(content[: 4 * _LONGEST_MESSAGE].decode("utf-8", "replace").split())
        return Refusal(status, text[:_LONGEST_MESSAGE], frozenset())
    found = body.get("error", body) if isinstance(body, Mapping) else body
    if not isinstance(found, Mapping):
        return Refusal(status, in_words(found), frozenset())
    message = in_words(found.get("message") or found.get("detail") or found)
    signs = (found.get(name) for name in ("code", "type", "param"))
    return Refusal(
        status,
        message,
        frozenset(sign for sign in signs if isinstance(sign, str)),
        *_counts(found, message),
    )


def in_words(error: Any) -> str:
    """What a server says, as one line of at most a thousand characters."""
    text = valid(error) if isinstance(error, str) else as_json(error).decode()
    return " ".join(text.split())[:_LONGEST_MESSAGE]


def _counts(error: Mapping[str, Any], message: str) -> tuple[int | None, int | None]:
    """Tokens of the prompt, and how many the server allows, if it reports them."""
    tokens, most = error.get("n_prompt_tokens"), error.get("n_ctx")  # llama.cpp
    if is_count(tokens) and is_count(most) and tokens:
        return tokens, most
    for pattern in _COUNTS:
        if found := pattern.search(message):
            tokens, most = int(found["n"]), int(found["most"])
            if is_count(tokens) and is_count(most) and tokens:
                return tokens, most
    return None, None


def status_in(answer: Any) -> int | None:
    """The error status in the body of a server that answers 200; None if there is none."""
    error = answer.get("error") if isinstance(answer, Mapping) else None
    code = error.get("code") if isinstance(error, Mapping) else None
    return code if isinstance(code, int) and code >= 400 else None


def too_long(refusal: Refusal, max_model_len: int | None) -> PromptTooLongError:
    """The refusal as the row's own error, with the counts that a cut needs, if known."""
    error = PromptTooLongError(refusal.message)
    error.prompt_tokens = refusal.prompt_tokens
    error.max_model_len = refusal.max_model_len or max_model_len
    return error


def max_model_len(model: Mapping[str, Any]) -> int | None:
    """A request's context, if the list of models has it: vLLM's field, or llama.cpp's of a slot."""
    meta = model.get("meta")
    most = model.get("max_model_len") or (meta.get("n_ctx") if isinstance(meta, Mapping) else None)
    return most if is_count(most) and most else None


def known_of(models: Sequence[Mapping[str, Any]], name: str | None) -> dict[str, Any]:
    """What a list of models says about the model that is requested as ``name``.

    It is the one with that name, or else the only one. vLLM lists its folder, llama.cpp its size,
    once it has loaded it.
    """
    named = [model for model in models if model.get("id") == name] or models
    if len(named) != 1:
        return {}
    (model,) = named
    meta = model.get("meta")
    known = {
        **(meta if isinstance(meta, Mapping) else {}),
        "id": model.get("id"),
        "root": model.get("root"),
    }
    keys = ("id", "root", "n_params", "n_vocab", "size")
    return {key: known[key] for key in keys if known.get(key) is not None}


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """How a model differs between two lists, given what each says of it (``known_of``)."""
    changes = [
        f"{key} was {before[key]!r}, is {now[key]!r}"
        for key in before
        if key in now and now[key] != before[key]
    ]
    return "; ".join(changes) or None


def retry_after_s(value: str | None) -> float | None:
    """The header in seconds, whether it gives seconds or a date (RFC 9110, 10.2.3)."""
    if not value:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time())
    except (ValueError, OverflowError):
        return None


def check_names(sampling: Mapping[str, Any]) -> None:
    """Refuse names that the API does not have: the server would silently ignore them.

    Raises:
        RequestError: naming the parameter.
    """
    for name in sampling:
        if name == "prompt_logprobs":
            raise RequestError("sampling.prompt_logprobs: batchkit does not store them")
        if name not in SAMPLING:
            raise RequestError(
                f"sampling.{name}: not a parameter of the API{did_you_mean(name, SAMPLING)}; put a"
                " server's own parameters into engine.options.extra_body"
            )


def _sampling(sampling: Mapping[str, Any], *, is_chat: bool) -> dict[str, Any]:
    check_names(sampling)
    body = {name: value for name, value in sampling.items() if value is not None}
    for name, value in body.items():  # JSON has only null for it: the server would use its default
        if isinstance(value, float) and not math.isfinite(value):
            raise RequestError(f"sampling.{name}: is {value}, expected a finite number")
    if is_chat and "logprobs" in body:  # in chat it is a switch, and top_logprobs the count
        body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    if (wanted := body.get("structured_outputs")) is not None:
        response_format = _response_format(wanted)
        if response_format is not None:
            del body["structured_outputs"]
            body["response_format"] = response_format
    return body


def _response_format(wanted: Any) -> dict[str, Any] | None:
    """OpenAI's own form, which every server supports; None if only vLLM has one."""
    if not isinstance(wanted, Mapping) or len(wanted) != 1:
        return None
    if wanted.get("json_object") is True:
        return {"type": "json_object"}
    schema = wanted.get("json")
    if isinstance(schema, str):
        try:
            schema = orjson.loads(schema)
        except orjson.JSONDecodeError:
            return None  # vLLM says what is wrong with it
    if not isinstance(schema, Mapping):
        return None
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": True},
    }


def _with_images(body: Mapping[str, Any], make: Callable[[Image], Any]) -> dict[str, Any]:
    """``body`` with each image in its messages, or in its pair, replaced by the result of ``make``."""

    def part(image: Image) -> dict[str, Any]:
        return {"type": "image_url", "image_url": make(image)}

    def side(content: Any) -> Any:
        if isinstance(content, str):
            return content
        return {"content": with_parts(content["content"], part)}

    made = dict(body)
    if "messages" in body:
        made["messages"] = loaded(list(body["messages"]), part)
    for name in PAIR & body.keys():
        value = body[name]
        made[name] = [side(one) for one in value] if isinstance(value, list) else side(value)
    return made


def _data_uri(image: Image) -> str:
    png = io.BytesIO()
    image.save(png, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(png.getbuffer()).decode()


def _usage(answer: Mapping[str, Any]) -> Usage | None:
    """None if the server does not report all counts: the answer is still valid."""
    counts = answer.get("usage")
    if not isinstance(counts, Mapping):
        return None
    details = counts.get("completion_tokens_details")
    return usage_of(
        counts.get("prompt_tokens"),
        counts.get("completion_tokens"),
        details.get("reasoning_tokens") if isinstance(details, Mapping) else None,
    )


def _choice(choice: Mapping[str, Any]) -> Choice:
    message = choice.get("message")
    beside = {} if message is None else message
    text = choice["text"] if message is None else message.get("content")
    if isinstance(text, list):  # some servers return parts
        text = "".join(part["text"] for part in text if part.get("type") == "text")
    if not isinstance(text, str | None):
        raise TypeError(f"text is {type(text).__name__}")
    return choice_of(
        text or "",
        _reason(choice),
        choice.get("logprobs"),
        # DeepSeek's name, which vLLM had, too, and other servers still have
        beside.get("reasoning") or beside.get("reasoning_content"),
        beside.get("tool_calls"),
    )


def _reason(choice: Mapping[str, Any]) -> Any:
    """The finish_reason; SGLang's internal one is an object, ``{"type": "abort", …}``, which a
    proxy may pass on. A router gives a choice an ``error`` instead."""
    reason = "error" if choice.get("error") else choice.get("finish_reason")
    return reason.get("type") if isinstance(reason, Mapping) else reason
