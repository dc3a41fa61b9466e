"""``task``, ``[pair]`` and ``[pooling]``, and which other keys fit them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field, PositiveInt, model_validator

from batchkit.config.tables.base import Identity, Table

TaskName = Literal["generate", "embed", "token_embed", "classify", "token_classify", "score"]
OF_TOKENS = ("token_embed", "token_classify")
WITH_VECTORS = ("embed", *OF_TOKENS)
FOR_VECTORS = 'task = "embed", "token_embed" or "token_classify"'


class PairTable(Table):
    """What `task = "score"` compares: a query with a document, or with each of a list. Templates are
    filled in as those of `[prompt]`."""

    query: Identity[str | None] = None
    """The query, or one of the two texts."""
    documents: Identity[str | None] = None
    """The text that it is compared with; or `{{ column }}` alone for a column with a list of texts,
    each of which gets its score."""
    query_images: Identity[list[str]] = Field([])
    """Images of the query, as `prompt.images`."""
    document_images: Identity[list[str]] = Field([])
    """Images of the document, as `prompt.images`. If `documents` is a list, each template gives a
    list as long, with one image for each document."""

    @property
    def is_set(self) -> bool:
        return self != PairTable()


class PoolingTable(Table):
    """For the tasks other than `generate`: given to `vllm.PoolingParams` as they are, so any
    of its names may be used here."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    dimensions: Identity[PositiveInt | None] = None
    """For `embed` and `token_embed`: only the first so many of a vector, if the model was trained for it
    (Matryoshka). With `dry-run`: the length of its vectors (8)."""
    normalize: Identity[bool | None] = None
    """For `embed` and `token_embed`: whether vectors get the length 1, by default as the model says. It is what vLLM
    calls `use_activation`."""

    def params(self) -> dict[str, Any]:
        """The names and values for ``vllm.PoolingParams``."""
        params = self.model_dump(exclude={"normalize"}, exclude_none=True)
        return params if self.normalize is None else {**params, "use_activation": self.normalize}

    @model_validator(mode="after")
    def _coherent(self) -> PoolingTable:
        if self.normalize is not None and "use_activation" in (self.model_extra or {}):
            raise ValueError(
                "normalize and use_activation are both given; they are one for task embed: keep one"
            )
        return self
