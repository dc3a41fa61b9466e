"""The body of an OpenAI batch line, in vLLM's terms.

https://platform.openai.com/docs/api-reference/batch: ``/v1/chat/completions`` has ``messages``,
``/v1/completions`` has ``prompt``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from batchkit.errors import RequestError

# Keys that are no sampling parameters, or do not change the answer when one model answers the whole
# file. ``rendering/tools.py`` reads those about tools and the chat template.
_IGNORED = frozenset(
    [
        "model",
        "messages",
        "prompt",
        "stream",
        "stream_options",
        "user",
        "metadata",
        "store",
        "service_tier",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "reasoning_effort",
        "chat_template_kwargs",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    ]
)
_RENAMED = {"max_completion_tokens": "max_tokens"}
_REFUSED = ("functions", "audio", "suffix", "echo", "best_of")


def messages_of(body: Any) -> tuple[Any, str | None]:
    """The chat messages, or the plain prompt; the other one is None.

    Raises:
        RequestError: the body has neither, or a key that a batch does not support.
    """
    if not isinstance(body, Mapping):
        raise RequestError(f"body: found {type(body).__name__}, expected an object")
    for name in _REFUSED:
        if body.get(name):
            raise RequestError(f"body.{name}: not supported; leave it out")
    if "messages" in body:
        return body["messages"], None
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise RequestError("body: has neither messages nor a text prompt")
    return None, prompt


def is_null(value: Any) -> bool:
    """Whether a parameter is not given: null, or NaN, which pandas has for a missing number."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def sampling_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body's parameters under the names of ``vllm.SamplingParams``."""
    sampling: dict[str, Any] = {}
    body = {name: value for name, value in body.items() if not is_null(value)}
    if "max_completion_tokens" in body:  # as in vLLM's server, it counts over its older name
        body.pop("max_tokens", None)
    for name, value in body.items():
        if name in _IGNORED or name in _REFUSED:
            continue
        if name == "response_format":
            sampling |= _structured_outputs(value)
        elif name == "logprobs":
            # chat: a switch, with the count in top_logprobs; completions: the count itself
            if value is not False:
                sampling["logprobs"] = body.get("top_logprobs") or 0 if value is True else value
        elif name != "top_logprobs":
            sampling[_RENAMED.get(name, name)] = value
    return sampling


def _structured_outputs(response_format: Any) -> dict[str, Any]:
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"structured_outputs": {"json_object": True}}
    holder = response_format.get("json_schema") if kind == "json_schema" else None
    schema = holder.get("schema") if isinstance(holder, Mapping) else None
    if schema is None:
        raise RequestError(
            f"body.response_format: found type {kind!r}; known: text, json_object, json_schema"
        )
    return {"structured_outputs": {"json": schema}}
