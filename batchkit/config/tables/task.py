"""The ``task`` names and the tables ``[pair]``, ``[pooling]`` and ``[speech]``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import (
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
)

from batchkit.config.tables.base import Identity, Table

TaskName = Literal[
    "generate", "embed", "token_embed", "classify", "token_classify", "score", "transcribe"
]
GENERATING = ("generate", "transcribe")
"""Tasks whose answer is text."""
OF_TOKENS = ("token_embed", "token_classify")
WITH_VECTORS = ("embed", *OF_TOKENS)
FOR_VECTORS = 'task = "embed", "token_embed" or "token_classify"'


class PairTable(Table):
    """The two sides of `task = "score"`: a query, and one document or a list of documents. Their templates use
    the same names as `[prompt]`."""

    query: Identity[str | None] = None
    """Template of the query."""
    documents: Identity[str | None] = None
    """Template of the document that is compared with the query. `{{ column }}` alone may name a column with a list
    of texts; each text then gets its own score."""
    query_images: Identity[list[str]] = Field([])
    """Images of the query, written like `prompt.images`."""
    document_images: Identity[list[str]] = Field([])
    """Images of the document, written like `prompt.images`. If `documents` is a list, each template must give
    a list of the same length, with one image per document."""

    @property
    def is_set(self) -> bool:
        return self != PairTable()


class PoolingTable(Table):
    """Parameters for `vllm.PoolingParams`, used by all tasks except `generate` and `transcribe`. Each parameter of
    `vllm.PoolingParams` may be used as a key here. With `use_activation = false`, vectors are not scaled to length 1,
    and logits are returned instead of probabilities."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    dimensions: Identity[PositiveInt | None] = None
    """For `embed` and `token_embed`: keep only the first `dimensions` values of each vector (by default all). The
    model must be trained for it (Matryoshka). With `dry-run`: the length of its vectors (default 8)."""

    def params(self) -> dict[str, Any]:
        """Return the keyword arguments for ``vllm.PoolingParams``."""
        return self.model_dump(exclude_none=True)


class SpeechTable(Table):
    """Settings for `task = "transcribe"`. `prompt.audios` names one recording per row."""

    language: Identity[str | None] = None
    """Language of the recording, for example `en`, or a template such as `{{ language }}`. By default Whisper detects
    the language first, as vLLM's server does."""
    prompt: Identity[str | None] = None
    """Text or template that the model treats as the preceding speech, for example names with their spelling."""
    timestamps: Identity[bool] = True
    """Ask the model for the start and end of each sentence, if it supports timestamps. With `false`, each chunk is one
    segment."""
    part_seconds: Identity[PositiveFloat] = 30.0
    """Maximum length of a chunk, in seconds, up to the model's own limit (30 s for Whisper)."""
    overlap_seconds: Identity[NonNegativeFloat] = 0.5
    """Maximum overlap between neighboring chunks, in seconds. If there is silence between two chunks, they overlap only
    within it."""
