"""The endpoints of pooling models: ``/v1/embeddings``, ``/classify`` and ``/v1/rerank``.

See https://platform.openai.com/docs/api-reference/embeddings, with the additions of `vllm serve`
(vllm/entrypoints/pooling). Cohere, Jina and llama.cpp have ``/rerank``, too. No code here touches
the network.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from batchkit.engines.openai.api import ShapeError
from batchkit.engines.openai.chat import Chat, Endpoint, as_shape
from batchkit.engines.openai.speech import Transcriptions
from batchkit.errors import InvalidOutputError, RequestError
from batchkit.storage.plain_json import valid
from batchkit.storage.schema import possible
from batchkit.types import Completion, Pooled, Request, Usage

if TYPE_CHECKING:
    import numpy as np

# Parameters that `vllm serve` reads for every task; OpenAI's own API has only dimensions.
_OF_ALL = (
    "use_activation",
    "truncate_prompt_tokens",
    "truncation_side",
    "padding",
    "mm_processor_kwargs",
)


class _Item(msgspec.Struct):
    """One entry of a response list. ``label`` is null for a class without a name."""

    index: int | None = None
    embedding: str | list[float] | None = None
    probs: list[float] | None = None
    label: str | None = None
    relevance_score: float | None = None


class _PoolingAnswer(msgspec.Struct):
    data: list[_Item] | None = None
    results: list[_Item] | None = None
    usage: Any = None
    error: Any = None


class _Endpoint(Endpoint):
    """Base class of the pooling endpoints."""

    def input_of(self, request: Request) -> dict[str, Any]:
        if request.messages is None:
            return {"input": request.prompt}
        return {"messages": request.messages}

    def completion_of(self, request: Request, answer: Any, latency_s: float, n: int) -> Completion:
        found = as_shape(answer, _PoolingAnswer)
        pooled = self.pooled_of(request, found)
        return Completion(request, (), _usage(found.usage), latency_s, pooled=pooled)

    def pooled_of(self, request: Request, answer: _PoolingAnswer) -> Pooled:
        """Return the vector, the class or the scores in the answer. Raises ShapeError or RowError like
        ``completion_of``."""
        raise NotImplementedError


class Embeddings(_Endpoint):
    """The endpoint ``/embeddings``. It requests base64, as OpenAI's client does.

    Base64 is exact, needs a quarter of the bytes, and saves the server from formatting numbers. Answers with plain
    numbers are accepted, too.
    """

    task = "embed"
    path = "/embeddings"
    parameters = ("dimensions", "add_special_tokens", *_OF_ALL)

    def input_of(self, request: Request) -> dict[str, Any]:
        return {**super().input_of(request), "encoding_format": "base64"}

    def pooled_of(self, request: Request, answer: _PoolingAnswer) -> Pooled:
        (item,) = _in_order(answer.data, 1)
        vector = _vector(item.embedding)
        found, wanted = len(vector), request.sampling.get("dimensions")
        if wanted is not None and found != wanted:
            raise InvalidOutputError(
                f"the vector has {found} dimensions, but pooling.dimensions is {wanted}: the"
                " server does not support `dimensions`, or its model has only one size; remove"
                " pooling.dimensions from the job"
            )
        if wanted is None and found != (usual := self.seen.setdefault("dimensions", found)):
            raise InvalidOutputError(
                f"the vector has {found} dimensions, but vectors of other rows have {usual}: one model"
                " gives vectors of one size; check that the server has only one model under this name"
            )
        return Pooled(vector=vector.tobytes())


class Classify(_Endpoint):
    """The endpoint ``/classify`` of ``vllm serve``. Its path does not begin with ``/v1``."""

    task = "classify"
    parameters = ("add_special_tokens", *_OF_ALL)

    def url(self, base_url: str, request: Request) -> str:
        return f"{base_url.removesuffix('/v1')}/classify"

    def pooled_of(self, request: Request, answer: _PoolingAnswer) -> Pooled:
        (item,) = _in_order(answer.data, 1)
        if not item.probs:
            raise ShapeError("data[0].probs has no numbers")
        label = item.label
        if label is None:  # use transformers' name for a class without a name
            label = f"LABEL_{max(range(len(item.probs)), key=item.probs.__getitem__)}"
        return Pooled(probabilities=item.probs, label=valid(label))


class Rerank(_Endpoint):
    """The endpoint ``/rerank``, in the format of Jina's API."""

    task = "score"
    path = "/rerank"
    parameters = (*_OF_ALL, "instruction", "max_tokens_per_query", "max_tokens_per_doc")

    def input_of(self, request: Request) -> dict[str, Any]:
        if request.pair is None:
            raise RequestError("nothing to score: the row has no query with documents")
        query, *documents = (
            side if isinstance(side, str) else {"content": side}
            for side in (request.pair.query, *request.pair.documents)
        )
        return {"query": query, "documents": documents}

    def pooled_of(self, request: Request, answer: _PoolingAnswer) -> Pooled:
        n_documents = len(request.pair.documents) if request.pair else 0
        items = _in_order(answer.results, n_documents)
        scores = [it.relevance_score for it in items if it.relevance_score is not None]
        if len(scores) < n_documents:
            raise ShapeError(f"found {len(scores)} scores for {n_documents} documents")
        return Pooled(scores=scores)


ENDPOINTS: dict[str, type[Endpoint]] = {
    "generate": Chat,
    "embed": Embeddings,
    "classify": Classify,
    "score": Rerank,
    "transcribe": Transcriptions,
}


def _in_order(items: list[_Item] | None, count: int) -> list[_Item]:
    """Return the ``count`` entries of a response list, ordered by index. Raises ShapeError if the indexes are not 0 to
    ``count - 1``."""
    if items is None or len(items) != count:
        found = "no list of results" if items is None else f"{len(items)} results"
        raise ShapeError(
            f"the server returned {found} for {count} inputs (vectors, classes or scores); the server or its model"
            " does not fit the task"
        )
    if count == 1 and items[0].index is None:
        return items
    by_index = {item.index: item for item in items}
    if by_index.keys() != {*range(count)}:
        raise ShapeError(
            f"the server's results have the indexes {[*by_index][:10]}, expected 0 to {count - 1}, each once"
        )
    return [by_index[place] for place in range(count)]


def _vector(found: str | list[float] | None) -> np.ndarray[Any, Any]:
    """Return a vector's numbers from base64 or from a list. Raises ShapeError if they are invalid."""
    import numpy as np

    try:
        if isinstance(found, str):
            vector = np.frombuffer(base64.b64decode(found, validate=True), "<f4")
        else:
            # Infinite values are refused when the vector is stored.
            with np.errstate(over="ignore"):
                vector = np.array(found or (), "<f4")
    except ValueError as error:  # binascii.Error is a ValueError
        raise ShapeError(f"data[0].embedding is not base64 of float32: {error}") from None
    if not len(vector):
        raise ShapeError("data[0].embedding has no numbers")
    return vector


def _usage(counts: Any) -> Usage | None:
    """Return the token counts, or None if the server reports none. Jina and TEI report only the total."""
    if not isinstance(counts, Mapping):
        return None
    prompt_tokens = counts.get("prompt_tokens")
    n_tokens = counts.get("total_tokens", -1) if prompt_tokens is None else prompt_tokens
    return possible(Usage(n_tokens, 0))
