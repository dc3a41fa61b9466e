"""Reading of OpenAI batch lines: the prompt in a line's ``body``, and the body's parameters under vLLM's names.

https://platform.openai.com/docs/api-reference/batch defines the bodies:

- ``/v1/chat/completions`` has ``messages``, ``/v1/completions`` has ``prompt``;
- ``/v1/responses`` is read by ``responses.py``;
- for pooling models, as in ``vllm run-batch``: ``/v1/embeddings`` has ``input`` or ``messages``, and ``/v1/score`` and
  ``/v1/rerank`` have a query and documents;
- ``/classify``, which run-batch does not support, has the keys of ``/v1/embeddings``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from batchkit.config.tables import RetryTable, TaskName
from batchkit.config.values import from_json
from batchkit.errors import RequestError, WrongTaskError
from batchkit.rendering.responses import as_chat
from batchkit.sources.reader import shown

# Keys that are no sampling parameters. ``rendering/tools.py`` reads those about tools and the chat template. Others
# have no effect, because one model answers the whole file.
_NO_SAMPLING = {
    *("model", "messages", "prompt", "stream", "stream_options", "user", "metadata", "store"),
    *("service_tier", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort"),
    *("chat_template_kwargs", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
}
_NEWER_NAMES = {"max_completion_tokens": "max_tokens"}
_REFUSED = ("functions", "audio", "suffix", "echo", "best_of")
_TASKS: dict[str, TaskName] = {
    "chat/completions": "generate",
    "completions": "generate",
    "responses": "generate",
    "embeddings": "embed",
    "classify": "classify",
    "score": "score",
    "rerank": "score",
    "audio/transcriptions": "transcribe",
}
# For each task of a job: the tasks of the lines that its engine can answer. For pairs, an embedding model returns the
# similarity of the two vectors as the score, and a classifier with one class returns the probability of that class.
_SERVED: dict[TaskName, tuple[TaskName, ...]] = {
    "generate": ("generate",),
    "embed": ("embed", "score"),
    "token_embed": ("embed", "score"),
    "classify": ("classify", "score"),
    "token_classify": ("classify",),
    "score": ("score", "embed", "classify"),
    "transcribe": ("transcribe",),
}
# For a job with this task: the task of the lines that it answers once per token.
_FOR_EACH_TOKEN = {"token_embed": "embed", "token_classify": "classify"}
# vLLM's names for the two sides of a pair.
_QUERY = ("query", "queries", "text_1", "data_1")
_DOCUMENTS = ("documents", "items", "text_2", "data_2")
_TEXTS = ("messages", "input", "prompt")
_NEWER_POOLING_NAMES = {"normalize": "use_activation"}  # vLLM's older name
# Keys that are no pooling parameters: they hold the prompt, choose the format of the answer (an export reads some of
# them), or have no effect on the answer.
_IGNORED = {
    *("model", "input", "messages", "chat_template_kwargs", "instruction", *_QUERY, *_DOCUMENTS),
    *("encoding_format", "embed_dtype", "endianness", "top_n", "return_documents"),
    *("user", "request_id", "priority", "cache_salt"),
}


def messages_of(body: Any) -> tuple[Any, str | None]:
    """Return the prompt in the body of a line for a generating task, as (chat messages, plain text). One of the two is
    None.

    Raises:
        RequestError: the body has neither messages nor a prompt, or has a key that is not supported.
    """
    body = _checked(body)
    for name in _REFUSED:
        if body.get(name):
            raise RequestError(f"body.{name}: not supported; leave it out")
    if "messages" in body:
        return body["messages"], None
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise RequestError(
            "body: has neither messages nor a prompt that is one text; write one line for each prompt,"
            " and write the prompt as text, not as token ids"
        )
    return None, prompt


def is_null(value: Any) -> bool:
    """Return whether a parameter is missing: null, or NaN, which pandas uses for a missing number."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def sampling_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body's parameters under the names of ``vllm.SamplingParams``."""
    sampling: dict[str, Any] = {}
    body = {name: value for name, value in body.items() if not is_null(value)}
    if "max_completion_tokens" in body:  # overrides max_tokens, its older name, as in vLLM's server
        body.pop("max_tokens", None)
    for name, value in body.items():
        if name in _NO_SAMPLING or name in _REFUSED:
            continue
        if name == "response_format":
            sampling |= _structured_outputs(value)
        elif name == "logprobs":
            # chat: a switch, with the count in top_logprobs; completions: the count itself
            if value is not False:
                sampling["logprobs"] = body.get("top_logprobs") or 0 if value is True else value
        elif name != "top_logprobs":
            sampling[_NEWER_NAMES.get(name, name)] = value
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


def row_sampling(
    sampling: Mapping[str, Any], fields: Mapping[str, Any], *, column: str | None, with_body: bool
) -> Mapping[str, Any]:
    """Return ``sampling`` overridden by the row's own sampling parameters.

    Null parameters are ignored, because in Parquet every row has the keys of all rows. So is NaN, pandas' form of null.

    - ``column``: name of the field with a table of parameters.
    - ``with_body``: True if the row is a batch line, whose ``body`` may have parameters.

    Raises:
        RequestError: the column is not a table, or the body has an unknown response format.
    """
    if with_body and isinstance(body := fields.get("body"), Mapping):
        sampling = {**sampling, **sampling_of(body)}
    found = None if column is None else fields.get(column)
    if is_null(found) or (isinstance(found, str) and not found):
        return sampling
    if not isinstance(own := from_json(found), Mapping):
        raise RequestError(
            f"{column}: found {shown(found)}, expected an object of sampling parameters, for example"
            ' {"temperature": 0}'
        )
    return {**sampling, **{name: value for name, value in own.items() if not is_null(value)}}


def with_temperature(
    sampling: Mapping[str, Any], attempt: int, retry: RetryTable
) -> Mapping[str, Any]:
    """Return ``sampling`` with the temperature of ``retry.temperatures`` for ``attempt``, counted from 1."""
    if not retry.temperatures:
        return sampling
    last = len(retry.temperatures) - 1
    return {**sampling, "temperature": retry.temperatures[min(attempt - 1, last)]}


class Sides(NamedTuple):
    """The two sides of a pair: a query, and documents to compare it with. Each side is a text, or content parts with
    images that are not loaded yet. ``is_list``: the row has a list of documents, not a single one."""

    query: Any
    documents: list[Any]
    is_list: bool


def endpoint_of(url: Any, task: TaskName) -> str | None:
    """Return the endpoint in the ``url`` of a batch line, for example "chat/completions"; None without a url.

    Raises:
        WrongTaskError: a job with the task ``task`` can't answer lines for this endpoint.
        RequestError: the endpoint is unknown.
    """
    if not isinstance(url, str) or not url:
        return None
    if (endpoint := _named_in(url)) is None:
        raise RequestError(f"url: {shown(url)} is not one of {', '.join(_TASKS)}")
    served = _SERVED[task]
    if (found := _TASKS[endpoint]) not in served:
        ends = [end for end in _TASKS if _TASKS[end] in served]
        raise WrongTaskError(
            f'url: {url} is for task = "{found}", but the job has task = "{task}", which serves'
            f' {", ".join(ends)}: put task = "{found}" at the top of the job file, or run it with'
            f" --set task={found}; a file with lines for several models needs a job for each model"
        )
    return endpoint


def task_of(endpoint: str | None, task: TaskName) -> TaskName:
    """Return the task of a batch line for ``endpoint``. If ``endpoint`` is None, return the job's ``task``.

    A job with the task "token_embed" or "token_classify" keeps its task for lines of "embeddings" or "classify".
    """
    found = _TASKS.get(endpoint or "", task)
    return task if _FOR_EACH_TOKEN.get(task) == found else found


def in_chat_terms(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the batch line ``fields``. If the line is for ``/v1/responses``, its body is converted to one for
    ``/v1/chat/completions``.

    Raises:
        RequestError: the body has an unsupported key.
    """
    if _named_in(fields.get("url")) != "responses":
        return fields
    return {**fields, "body": as_chat(fields["body"])}


def _named_in(url: Any) -> str | None:
    if not isinstance(url, str):
        return None
    return next((end for end in _TASKS if url.rstrip("/").endswith(f"/{end}")), None)


def input_of(body: Any) -> tuple[Any, str | None]:
    """Return the input to embed or classify as (chat messages, plain text); one of the two is None.

    Raises:
        RequestError: the body has no input, or several inputs.
    """
    body = _checked(body)
    found = body.get("messages", body.get("input"))
    if found is None:
        raise RequestError("body: has neither input nor messages; add one of them")
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
        f"body.input: found {shown(found)}, expected a text; token ids are not supported"
    )


def sides_of(body: Any) -> Sides:
    """Return the query and the documents in the body of a line for ``/v1/score`` or ``/v1/rerank``.

    Raises:
        RequestError: the query or the documents are missing, or there are several queries.
    """
    body = _checked(body)
    query, documents = _side(body, _QUERY), _side(body, _DOCUMENTS)
    if isinstance(query, list):
        if len(query) != 1:
            raise RequestError(
                f"body: has {len(query)} queries; a row has one query, with one document or more:"
                " write one line per pair"
            )
        (query,) = query
    is_list = isinstance(documents, list)
    found = documents if is_list else [documents]
    if not found:
        raise RequestError("body: has no documents; add at least one")
    return Sides(_content(query), list(map(_content, found)), is_list)


def contents_of(body: Any) -> list[Mapping[str, Any]]:
    """Return the parts of a body that may contain images: its messages, or the query and the documents of a pair."""
    names = [name for name in (*_QUERY, *_DOCUMENTS) if name in _checked(body)]
    sides = [body[name] for name in names]
    parts = [one for side in sides for one in (side if isinstance(side, list) else [side])]
    found = parts or body.get("messages", body.get("input"))
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def texts_in(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``body`` that contain text for the model: messages, input or prompt, query and
    documents."""
    names = (next((n for n in group if n in body), None) for group in (_TEXTS, _QUERY, _DOCUMENTS))
    return {name: body[name] for name in names if name is not None}


def pooling_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body's parameters under the names of ``vllm.PoolingParams``."""
    return {
        _NEWER_POOLING_NAMES.get(name, name): value
        for name, value in body.items()
        if name not in _IGNORED and value is not None
    }


def _checked(body: Any) -> Mapping[str, Any]:
    if not isinstance(body, Mapping):
        raise RequestError(
            f"body: found {type(body).__name__}, expected a JSON object with the request's keys"
        )
    return body


def _several(what: str, count: int) -> RequestError:
    return RequestError(
        f"body: has {count} {what}, but a row has one answer: write one line for each, with"
        " a different custom_id"
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
    """Return one side of a pair: as text, or as a list of content parts if it has vLLM's form
    ``{"content": [parts]}``."""
    content = side.get("content") if isinstance(side, Mapping) else side
    if isinstance(content, str) or (isinstance(side, Mapping) and isinstance(content, list)):
        return content
    raise RequestError(f'body: found {shown(side)}, expected text, or {{"content": [parts]}}')
