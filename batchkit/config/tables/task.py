"""``task``, ``[pair]`` and ``[pooling]``, and which other keys fit them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict, Field, PositiveInt, model_validator

from batchkit.config.tables.base import Identity, Table
from batchkit.config.tables.engine import SamplingTable

if TYPE_CHECKING:
    from batchkit.config.tables.job import JobConfig

TaskName = Literal["generate", "embed", "classify", "score"]

_OF_PROMPT = (
    *("system", "system_file", "user", "user_file", "images", "captions", "chat"),
    "chat_template_kwargs",
)


class PairTable(Table):
    """What `task = "score"` compares: a query with a document, or with each of a list. Templates are
    filled in as those of `[prompt]`."""

    query: Identity[str | None] = Field(None, description="The query, or one of the two texts.")
    documents: Identity[str | None] = Field(
        None,
        description="The text that it is compared with; or `{{ column }}` alone for a column with a list"
        " of texts, each of which gets its score.",
    )
    query_images: Identity[list[str]] = Field(
        [], description="Images of the query, as `prompt.images`."
    )
    document_images: Identity[list[str]] = Field(
        [],
        description="Images of the document, as `prompt.images`. If `documents` is a list, each template"
        " gives a list as long, with one image for each document.",
    )

    @property
    def is_set(self) -> bool:
        return self != PairTable()


class PoolingTable(Table):
    """For the tasks `embed`, `classify` and `score`: given to `vllm.PoolingParams` as they are, so any
    of its names may be used here."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    dimensions: Identity[PositiveInt | None] = Field(
        None,
        description="For `embed`: only the first so many of a vector, if the model was trained for it"
        " (Matryoshka). With `dry-run`: the length of its vectors (8).",
    )
    normalize: Identity[bool | None] = Field(
        None,
        description="For `embed`: whether vectors get the length 1, by default as the model says. It is"
        " what vLLM calls `use_activation`.",
    )

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


def misfits(job: JobConfig) -> Iterator[str]:
    """A line for each key of ``job`` that does not fit its task."""
    task, pair, pooling = job.task, job.pair, job.pooling
    if task != "score" and pair.is_set:
        yield f'[pair]: is for task = "score"; task is "{task}"'
    if task == "generate":
        if pooling.params():
            yield (
                '[pooling]: is for the tasks "embed", "classify" and "score"; task is "generate", whose'
                " parameters belong in [sampling]"
            )
        return
    if job.engine.kind == "transformers":
        yield (
            f'engine.kind: "transformers" has no task "{task}"; use "vllm", a server, or "dry-run" to'
            " try the job without a model"
        )
    for key, is_set in _of_generation(job):
        if is_set:
            yield f'{key}: is for task = "generate", whose answer is a text; task is "{task}", so leave it out'
    if task != "embed":
        for name in ("dimensions", "normalize"):
            if getattr(pooling, name) is not None:
                yield f'pooling.{name}: is for task = "embed"; task is "{task}"'
    if task == "score":
        yield from _misfits_of_score(job)
    elif not job.prompt.chat and (job.prompt.system or job.prompt.system_file):
        yield (
            f"prompt.system: task {task} sends prompt.user as it is, without the model's chat template;"
            " set prompt.chat = true, or put the text in front of prompt.user"
        )


def _of_generation(job: JobConfig) -> Iterator[tuple[str, bool]]:
    """Keys that have a meaning only where text is generated, and whether ``job`` sets them."""
    yield "[sampling]", job.sampling != SamplingTable()
    yield "prompt.tools", job.prompt.tools is not None
    yield "output.parse", job.output.parse is not None
    yield "retry.reask", job.retry.reask > 0
    yield "retry.temperatures", job.retry.temperatures is not None
    yield "[scoring]", job.scoring.is_on and job.task != "classify"


def _misfits_of_score(job: JobConfig) -> Iterator[str]:
    pair, prompt = job.pair, job.prompt
    is_set = pair.is_set or not job.input.may_be_batch  # each line of a batch has its own
    if is_set and pair.query is None and not pair.query_images:
        yield 'pair.query: is missing: task = "score" compares it with pair.documents'
    if is_set and pair.documents is None and not pair.document_images:
        yield (
            'pair.documents: is missing: a template of the text that task = "score" compares with'
            " pair.query, or {{ column }} for a column with a list of texts"
        )
    for name in _OF_PROMPT:
        if getattr(prompt, name):
            yield f'prompt.{name}: task = "score" has [pair] instead: query and documents'
