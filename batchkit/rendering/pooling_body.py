"""The body of an OpenAI batch line for a pooling model, as ``vllm run-batch`` takes it.

``/v1/embeddings`` has ``input`` or ``messages``, ``/v1/score`` and ``/v1/rerank`` have a query and its
documents. ``/classify``, which run-batch does not know, is like ``/v1/embeddings``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from batchkit.errors import RequestError, WrongTaskError
from batchkit.rendering.messages import short

_TASKS = {
    "chat/completions": "generate",
    "completions": "generate",
    "embeddings": "embed",
    "classify": "classify",
    "score": "score",
    "rerank": "score",
}
# vLLM's names for the two sides of a pair.
_QUERY = ("query", "queries", "text_1", "data_1")
_DOCUMENTS = ("documents", "items", "text_2", "data_2")
_TEXTS = ("messages", "input", "prompt")
_RENAMED = {"normalize": "use_activation"}  # vLLM's older name
_INPUT = frozenset(
    ["model", "input", "messages", "chat_template_kwargs", "instruction", *_QUERY, *_DOCUMENTS]
)
# How the answer is written, and what changes no answer; an export reads some of them.
_IGNORED = _INPUT | {
    "encoding_format",
    "embed_dtype",
    "endianness",
    "top_n",
    "return_documents",
    "user",
    "request_id",
    "priority",
    "cache_salt",
}


class Sides(NamedTuple):
    """What a body compares; each side is text or a list of parts, whose images are not loaded."""

    query: Any
    documents: list[Any]
    is_list: bool


def check_url(url: Any, task: str) -> None:
    """A line without a url fits any task.

    Raises:
        WrongTaskError: a line for ``url`` is for another task.
        RequestError: no task has such lines.
    """
    if not isinstance(url, str) or not url:
        return
    found = task_of(url)
    if found is None and task != "generate":
        raise RequestError(f"url: {short(url)} is not one of {', '.join(_TASKS)}")
    if found not in (None, task):
        raise WrongTaskError(
            f'url: {url} is for task = "{found}", and the job has task = "{task}": put task ='
            f' "{found}" at the top of the job file, or run it with --set task={found}; a file with'
            " lines of several tasks needs a job for each"
        )


def task_of(url: str) -> str | None:
    """The task that lines for ``url`` are for; None if there is none."""
    return next((task for end, task in _TASKS.items() if url.rstrip("/").endswith(f"/{end}")), None)


def input_of(body: Any) -> tuple[Any, str | None]:
    """The chat messages, or the text, of what is embedded or classified; the other one is None.

    Raises:
        RequestError: there is neither, or several texts.
    """
    body = _checked(body)
    found = body.get("messages", body.get("input"))
    if found is None:
        raise RequestError("body: has neither input nor messages")
    if isinstance(found, list) and found and all(isinstance(item, list) for item in found):
        raise _several("conversations" if "messages" in body else "lists", len(found))
    if "messages" in body or _is_chat(found):
        return found, None
    if isinstance(found, list) and found and all(isinstance(item, str) for item in found):
        if len(found) > 1:
            raise _several("texts", len(found))
        found = found[0]
    if isinstance(found, str):
        return None, found
    raise RequestError(
        f"body.input: found {short(found)}, expected a text; numbers of tokens are not supported"
    )


def sides_of(body: Any) -> Sides:
    """The query and the documents of what is scored.

    Raises:
        RequestError: one of them is missing, or there are several queries.
    """
    body = _checked(body)
    query, documents = _side(body, _QUERY), _side(body, _DOCUMENTS)
    if isinstance(query, list):
        if len(query) != 1:
            raise RequestError(
                f"body: has {len(query)} queries; a row has one query, with one document or more:"
                " make each pair a line of its own"
            )
        (query,) = query
    is_list = isinstance(documents, list)
    found = documents if is_list else [documents]
    if not found:
        raise RequestError("body: has no documents")
    return Sides(_content(query), list(map(_content, found)), is_list)


def contents_of(body: Any) -> list[Mapping[str, Any]]:
    """What may have images: the messages, or the sides of a pair as if they were messages."""
    names = [name for name in (*_QUERY, *_DOCUMENTS) if name in _checked(body)]
    sides = [body[name] for name in names]
    parts = [one for side in sides for one in (side if isinstance(side, list) else [side])]
    found = parts or body.get("messages", body.get("input"))
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def texts_in(body: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of the body that are sent to the model, without its parameters."""
    names = (next((n for n in group if n in body), None) for group in (_TEXTS, _QUERY, _DOCUMENTS))
    return {name: body[name] for name in names if name is not None}


def pooling_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body's parameters under the names of ``vllm.PoolingParams``."""
    return {
        _RENAMED.get(name, name): value
        for name, value in body.items()
        if name not in _IGNORED and value is not None
    }


def _checked(body: Any) -> Mapping[str, Any]:
    if not isinstance(body, Mapping):
        raise RequestError(f"body: found {type(body).__name__}, expected an object")
    return body


def _several(what: str, count: int) -> RequestError:
    return RequestError(
        f"body: has {count} {what}; a row has one answer: make each of them a line of its own, with"
        " its own custom_id"
    )


def _is_chat(found: Any) -> bool:
    return (
        isinstance(found, list)
        and bool(found)
        and all(isinstance(item, Mapping) and "role" in item for item in found)
    )


def _side(body: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    for name in names:
        if body.get(name) is not None:
            return body[name]
    raise RequestError(f"body: has none of {', '.join(names)}")


def _content(side: Any) -> Any:
    """Text, or the parts of vLLM's ``{"content": [parts]}``."""
    content = side.get("content") if isinstance(side, Mapping) else side
    if isinstance(content, str) or (isinstance(side, Mapping) and isinstance(content, list)):
        return content
    raise RequestError(f'body: found {short(side)}, expected text, or {{"content": [parts]}}')
