"""The endpoints of pooling models: ``/v1/embeddings``, ``/classify``, ``/v1/score``, ``/v1/rerank``.

https://platform.openai.com/docs/api-reference/embeddings, with what `vllm serve` adds to it
(vllm/entrypoints/pooling); ``/rerank`` is also Cohere's, Jina's and llama.cpp's. Nothing here
touches the network.
"""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from batchkit.config.tables import JobConfig
from batchkit.engines.openai.api import ShapeError, in_words, pair_of
from batchkit.engines.openai.chat import Chat, Endpoint, as_shape
from batchkit.errors import InvalidOutputError
from batchkit.storage.plain_json import valid
from batchkit.storage.schema import usage_of
from batchkit.types import Completion, Content, Pooled, Request, Usage

# What `vllm serve` reads besides the input, by task; OpenAI's own API has only dimensions.
_OF_ALL = (
    "use_activation",
    "truncate_prompt_tokens",
    "truncation_side",
    "padding",
    "mm_processor_kwargs",
)
LACKS = (404, 405, 501)


class _Item(msgspec.Struct):
    """Of any of the lists. ``label`` is null for a class without a name."""

    index: int | None = None
    embedding: str | list[float] | None = None
    probs: list[float] | None = None
    label: str | None = None
    score: float | None = None
    relevance_score: float | None = None


class _Answer(msgspec.Struct):
    data: list[_Item] | None = None
    results: list[_Item] | None = None
    usage: Any = None
    error: Any = None


class _Endpoint(Endpoint):
    """What the endpoints have in common."""

    def body_of(self, request: Request) -> dict[str, Any]:
        self.check_names(request.sampling)
        body: dict[str, Any] = {"model": self._model, **self._input(request)}
        kwargs = {**self._chat_template_kwargs, **request.chat_template_kwargs}
        if kwargs and request.prompt is None:
            body["chat_template_kwargs"] = kwargs
        body |= {name: value for name, value in request.sampling.items() if value is not None}
        return {name: value for name, value in body.items() if name not in self._drop}

    def completion_of(self, request: Request, answer: Any, latency_s: float, n: int) -> Completion:
        found = as_shape(answer, _Answer)
        if found.error:
            raise ShapeError(f"the answer has an error: {in_words(found.error)}")
        pooled = self._pooled(request, found)
        return Completion(request, (), _usage(found.usage), latency_s, pooled=pooled)

    def _input(self, request: Request) -> dict[str, Any]:
        if request.messages is None:
            return {"input": request.prompt}
        return {"messages": request.messages}

    def _pooled(self, request: Request, answer: _Answer) -> Pooled:
        raise NotImplementedError


class Embeddings(_Endpoint):
    """``/embeddings``. base64 is asked for, as OpenAI's own client does: it is exact, a quarter of the
    size, and the server need not write numbers; a server that answers with numbers is read as well."""

    task = "embed"
    parameters = ("dimensions", "add_special_tokens", *_OF_ALL)
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

    def _pooled(self, request: Request, answer: _Answer) -> Pooled:
        (item,) = _in_order(answer.data, 1)
        vector = _vector(item.embedding)
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
    parameters = ("add_special_tokens", *_OF_ALL)
    hint = "`vllm serve` has it for a model that classifies (--runner pooling)"

    def url(self, base_url: str, request: Request) -> str:
        return f"{base_url.removesuffix('/v1')}/classify"

    def _pooled(self, request: Request, answer: _Answer) -> Pooled:
        (item,) = _in_order(answer.data, 1)
        if not item.probs:
            raise ShapeError("data[0].probs: has no numbers")
        label = item.label
        if label is None:  # a name that transformers gives a class without one
            label = f"LABEL_{max(range(len(item.probs)), key=item.probs.__getitem__)}"
        return Pooled(probabilities=item.probs, label=valid(label))


class Scores(_Endpoint):
    """``/score``; on a server that lacks it, ``/rerank``, in the shape of Jina's API."""

    task = "score"
    parameters = (*_OF_ALL, "instruction", "max_tokens_per_query", "max_tokens_per_doc")
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

    def _pooled(self, request: Request, answer: _Answer) -> Pooled:
        count = len(request.pair.documents) if request.pair else 0
        if answer.results is not None:
            scores = [item.relevance_score for item in _in_order(answer.results, count)]
        else:
            scores = [item.score for item in _in_order(answer.data, count)]
            self._has_score = True
        known = [score for score in scores if score is not None]
        if len(known) < count:
            raise ShapeError("a document has no score")
        return Pooled(scores=known)


ENDPOINTS: dict[str, type[Endpoint]] = {
    "generate": Chat,
    "embed": Embeddings,
    "classify": Classify,
    "score": Scores,
}


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


def _in_order(items: list[_Item] | None, count: int) -> list[_Item]:
    """The ``count`` items of a list in the order of their indexes.

    Raises:
        ShapeError: there are others.
    """
    if items is None or len(items) != count:
        found = "no list" if items is None else f"a list of {len(items)}"
        raise ShapeError(f"found {found}, expected a list of {count}")
    if count == 1 and items[0].index is None:
        return items
    by_index = {item.index: item for item in items}
    if by_index.keys() != {*range(count)}:
        raise ShapeError(f"found the indexes {[*by_index][:10]}, expected 0 to {count - 1}")
    return [by_index[place] for place in range(count)]


def _vector(found: str | list[float] | None) -> array[float]:
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
            vector.extend(found or ())
    except (ValueError, OverflowError) as error:  # binascii.Error is one
        raise ShapeError(f"data[0].embedding: is no base64 of float32: {error}") from None
    if not vector:
        raise ShapeError("data[0].embedding: has no numbers")
    return vector


def _little_endian(vector: array[float]) -> bytes:
    if sys.byteorder == "big":
        vector = vector[:]
        vector.byteswap()
    return vector.tobytes()


def _usage(counts: Any) -> Usage | None:
    """None if the server reports none; Jina's and TEI's report only the sum."""
    if not isinstance(counts, Mapping):
        return None
    prompt_tokens = counts.get("prompt_tokens")
    return usage_of(counts.get("total_tokens") if prompt_tokens is None else prompt_tokens, 0)
