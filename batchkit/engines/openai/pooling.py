"""The endpoints of pooling models: ``/v1/embeddings``, ``/classify``, ``/v1/score``, ``/v1/rerank``.

https://platform.openai.com/docs/api-reference/embeddings, with what `vllm serve` adds to it
(vllm/entrypoints/pooling); ``/rerank`` is also Cohere's, Jina's and llama.cpp's. Nothing here
touches the network.
"""

from __future__ import annotations

import base64
import binascii
import math
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from batchkit.config.suggest import did_you_mean
from batchkit.config.tables import JobConfig
from batchkit.engines.openai.api import ShapeError, in_words, pair_of
from batchkit.errors import InvalidOutputError, RequestError
from batchkit.storage.plain_json import valid
from batchkit.storage.schema import usage_of
from batchkit.types import Completion, Content, Pooled, Request, Usage

# What `vllm serve` reads besides the input, by task; OpenAI's own API has only dimensions.
_OF_ALL = (
    "use_activation",
    "truncate_prompt_tokens",
    "truncation_side",
    "add_special_tokens",
    "padding",
    "mm_processor_kwargs",
)
PARAMETERS = {
    "embed": ("dimensions", *_OF_ALL),
    "classify": _OF_ALL,
    "score": (
        "use_activation",
        "truncate_prompt_tokens",
        "truncation_side",
        "padding",
        "mm_processor_kwargs",
        "instruction",
        "max_tokens_per_query",
        "max_tokens_per_doc",
    ),
}
LACKS = (404, 405, 501)


class _Endpoint:
    """What the endpoints have in common."""

    task: str
    hint: str

    def __init__(self, job: JobConfig, drop: Sequence[str]) -> None:
        self._model, self._drop = job.engine.model, drop
        self._chat_template_kwargs = job.prompt.chat_template_kwargs

    def body_of(self, request: Request) -> dict[str, Any]:
        check_names(self.task, request.sampling)
        body: dict[str, Any] = {"model": self._model, **self._input(request)}
        kwargs = {**self._chat_template_kwargs, **request.chat_template_kwargs}
        if kwargs and request.prompt is None:
            body["chat_template_kwargs"] = kwargs
        body |= {name: value for name, value in request.sampling.items() if value is not None}
        return {name: value for name, value in body.items() if name not in self._drop}

    def completion_of(self, request: Request, answer: Any, latency_s: float, n: int) -> Completion:
        if not isinstance(answer, Mapping):
            raise ShapeError(f"found {type(answer).__name__}, expected an object")
        pooled = self._pooled(request, answer)
        return Completion(request, (), _usage(answer), latency_s, pooled=pooled)

    def failure_in(self, answer: Mapping[str, Any]) -> str | None:
        error = answer.get("error")
        return f"the answer has an error: {in_words(error)}" if error else None

    def moved(self, url: str, status: int) -> bool:
        return False

    @property
    def seen(self) -> Mapping[str, Any]:
        return {}

    def _input(self, request: Request) -> dict[str, Any]:
        if request.messages is None:
            return {"input": request.prompt}
        return {"messages": request.messages}

    def _pooled(self, request: Request, answer: Mapping[str, Any]) -> Pooled:
        raise NotImplementedError


class Embeddings(_Endpoint):
    """``/embeddings``. base64 is asked for, as OpenAI's own client does: it is exact, a quarter of the
    size, and the server need not write numbers; a server that answers with numbers is read as well."""

    task = "embed"
    hint = "`vllm serve` has it for an embedding model (--runner pooling), llama-server with --embedding"

    def __init__(self, job: JobConfig, drop: Sequence[str]) -> None:
        super().__init__(job, drop)
        self._sizes: dict[int | None, int] = {}  # by the size asked for

    def url(self, base_url: str, request: Request) -> str:
        return f"{base_url}/embeddings"

    @property
    def seen(self) -> Mapping[str, Any]:
        """The size of the model's vectors, if one was answered that no parameter shortens."""
        return {"dimensions": self._sizes[None]} if None in self._sizes else {}

    def _input(self, request: Request) -> dict[str, Any]:
        return {**super()._input(request), "encoding_format": "base64"}

    def _pooled(self, request: Request, answer: Mapping[str, Any]) -> Pooled:
        (item,) = _in_order(answer, "data", 1)
        vector = _vector(item.get("embedding"))
        found, wanted = len(vector), request.sampling.get("dimensions")
        if wanted is not None and found != wanted:
            raise InvalidOutputError(
                f"the vector has {found} dimensions, and pooling.dimensions asks for {wanted}: the"
                " server does not know `dimensions`, or its model has one size only; leave it out"
            )
        if found != (usual := self._sizes.setdefault(wanted, found)):
            raise InvalidOutputError(
                f"the vector has {found} dimensions, and those of other rows have {usual}: one model"
                " gives vectors of one size; does the server have several models under this name?"
            )
        return Pooled(vector=_little_endian(vector))


class Classify(_Endpoint):
    """``/classify``, which `vllm serve` has beside ``/v1``."""

    task = "classify"
    hint = "`vllm serve` has it for a model that classifies (--runner pooling)"

    def url(self, base_url: str, request: Request) -> str:
        return f"{base_url.removesuffix('/v1')}/classify"

    def _pooled(self, request: Request, answer: Mapping[str, Any]) -> Pooled:
        (item,) = _in_order(answer, "data", 1)
        probabilities = item.get("probs")
        if not isinstance(probabilities, list) or not probabilities:
            raise ShapeError(f"data[0].probs: found {_short(probabilities)}, expected numbers")
        numbers = [_number(value, "data[0].probs") for value in probabilities]
        label = item.get("label")
        if label is None:  # a name that transformers gives a class without one
            label = f"LABEL_{max(range(len(numbers)), key=numbers.__getitem__)}"
        if not isinstance(label, str):
            raise ShapeError(f"data[0].label: found {_short(label)}, expected text")
        return Pooled(probabilities=numbers, label=valid(label))


class Scores(_Endpoint):
    """``/score``; on a server that lacks it, ``/rerank``, in the shape of Jina's API."""

    task = "score"
    hint = (
        "`vllm serve` has /score and /rerank for a reranker or an embedding model (--runner pooling),"
        " llama-server has /rerank with --reranking"
    )

    def __init__(self, job: JobConfig, drop: Sequence[str]) -> None:
        super().__init__(job, drop)
        self._has_score: bool | None = None  # until it has answered

    def url(self, base_url: str, request: Request) -> str:
        return base_url + ("/rerank" if self._has_score is False else "/score")

    def moved(self, url: str, status: int) -> bool:
        if status not in LACKS or not url.endswith("/score"):
            return False
        if self._has_score is None:
            self._has_score = False
        return not self._has_score

    def _input(self, request: Request) -> dict[str, Any]:
        if self._has_score is False:
            return pair_of(request)
        return pair_of(request, "text_1", "text_2")  # vLLM's newer names: queries, documents

    def _pooled(self, request: Request, answer: Mapping[str, Any]) -> Pooled:
        count = len(request.pair.documents) if request.pair else 0
        if "results" in answer:
            scores = _in_order(answer, "results", count)
            names = ("results", "relevance_score")
        else:
            scores = _in_order(answer, "data", count)
            names = ("data", "score")
            self._has_score = True
        place = "[].".join(names)
        return Pooled(scores=[_number(item.get(names[1]), place) for item in scores])


ENDPOINTS: dict[str, type[Embeddings | Classify | Scores]] = {
    "embed": Embeddings,
    "classify": Classify,
    "score": Scores,
}


def check_names(task: str, params: Mapping[str, Any]) -> None:
    """Refuse names that the API does not have: the server would silently ignore them.

    Raises:
        RequestError: naming the parameter.
    """
    known = PARAMETERS[task]
    for name in params:
        if name not in known:
            hint = did_you_mean(name, known) or f"; it has {', '.join(known)}"
            raise RequestError(
                f'pooling.{name}: not a parameter of the API with task = "{task}"{hint}; put a'
                " server's own parameters into engine.options.extra_body"
            )


def longest_of(request: Request) -> str:
    """The query with the longest document of the request's pair, without its images: at least as long as
    what a server may find too long."""
    if request.pair is None:
        return ""
    documents = max(map(_text, request.pair.documents), key=len, default="")
    return f"{_text(request.pair.query)}\n{documents}"


def _text(content: Content) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text", "") for part in content)


def _in_order(answer: Mapping[str, Any], name: str, count: int) -> list[Mapping[str, Any]]:
    """The ``count`` items of the list ``name`` in the order of their indexes.

    Raises:
        ShapeError: there are others.
    """
    found = answer.get(name)
    if not isinstance(found, list) or not all(isinstance(item, Mapping) for item in found):
        raise ShapeError(f"{name}: found {_short(found)}, expected a list of {count} objects")
    if len(found) != count:
        raise ShapeError(f"{name}: found {len(found)} items, expected {count}")
    places = [item.get("index") for item in found]
    if count == 1 and places == [None]:
        return found
    by_index = {
        place: item for place, item in zip(places, found, strict=True) if type(place) is int
    }
    if by_index.keys() != set(range(count)):
        raise ShapeError(f"{name}[].index: found {_short(places)}, expected 0 to {count - 1}")
    return [by_index[place] for place in range(count)]


def _vector(found: Any) -> array[float]:
    """The numbers of a vector, from either encoding.

    Raises:
        ShapeError: they are no vector.
    """
    vector = array("f")
    try:
        if isinstance(found, str):
            vector.frombytes(base64.b64decode(found, validate=True))
            if sys.byteorder == "big":
                vector.byteswap()
        else:
            if not isinstance(found, list) or bool in map(type, found):
                raise TypeError
            vector.extend(found)
    except (TypeError, ValueError, OverflowError, binascii.Error):
        raise ShapeError(
            f"data[0].embedding: found {_short(found)}, expected a list of numbers, or base64 of"
            " float32"
        ) from None
    if not vector:
        raise ShapeError("data[0].embedding: has no numbers")
    return vector


def _little_endian(vector: array[float]) -> bytes:
    if sys.byteorder == "big":
        vector = vector[:]
        vector.byteswap()
    return vector.tobytes()


def _number(found: Any, place: str) -> float:
    if type(found) not in (int, float):
        raise ShapeError(f"{place}: found {_short(found)}, expected a number")
    try:
        return float(found)
    except OverflowError:
        return math.inf


def _usage(answer: Mapping[str, Any]) -> Usage | None:
    """None if the server reports none; Jina's and TEI's report only the sum."""
    counts = answer.get("usage")
    if not isinstance(counts, Mapping):
        return None
    prompt_tokens = counts.get("prompt_tokens")
    return usage_of(counts.get("total_tokens") if prompt_tokens is None else prompt_tokens, 0)


def _short(value: Any) -> str:
    return in_words(value)[:80] if value is not None else "nothing"
