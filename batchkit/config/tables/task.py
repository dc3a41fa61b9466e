"""``task``, ``[pair]``, ``[pooling]`` and ``[speech]``, and which other keys fit them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import (
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from batchkit.config.tables.base import Identity, Table

TaskName = Literal[
    "generate", "embed", "token_embed", "classify", "token_classify", "score", "transcribe"
]
GENERATING = ("generate", "transcribe")
"""Those whose answer is a text."""
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


class SpeechTable(Table):
    """For `task = "transcribe"`, whose recordings `prompt.audios` names, one for each row."""

    language: Identity[str | None] = None
    """The language of the recording, for example `en`; or a template, for example `{{ language }}`. Without it, Whisper is
    asked first which of its languages it hears, as vLLM's server does."""
    prompt: Identity[str | None] = None
    """A text that the model takes for what was said before, for example names and how they are spelt; or a template."""
    timestamps: Identity[bool] = True
    """Ask the model when each sentence begins and ends, if it can say so. `false`: each part of a recording is one
    segment."""
    part_seconds: Identity[PositiveFloat] = 30.0
    """The longest part that the model is given, at most what it can hear: 30 seconds for Whisper."""
    overlap_seconds: Identity[NonNegativeFloat] = 0.5
    """By how much a part may reach into the silence behind it, and where a recording has none, into the speech."""
