"""The columns of a table of records: those of every record, and those that only some jobs have."""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import NamedTuple

from batchkit.config.tables import JobConfig
from batchkit.runs.parsed_columns import parsed_columns
from batchkit.scoring import kept_fields, score_names
from batchkit.storage.job_toml import job_of_run
from batchkit.storage.log import RESULTS
from batchkit.storage.newest import read_newest
from batchkit.storage.vectors import Vectors, VectorType, segments_of

EMBEDDING = "embedding"
VECTOR = "vector"


class Column(NamedTuple):
    """Its Arrow type, or ``VECTOR``, and the keys of its value in a record."""

    type: str
    keys: tuple[str, ...]


class Layout(NamedTuple):
    """The columns of a table of records by name, in order; ``embedding``: the type of the vectors."""

    columns: Mapping[str, Column]
    embedding: VectorType | None = None

    @classmethod
    def of(cls, folder: Path, *, fields: bool = True, vectors: bool = True) -> Layout:
        """Fixed by the job, so that every export of a run has the same columns; those of parsed
        answers and of scores also depend on the answers. A kept field, a key of the answers or a step with the name
        of another column gets the prefix ``fields.``, ``parsed.`` or ``steps.`` until its name is free. Without kept
        ``fields``, or without ``vectors``, if they are not wanted."""
        job, log = job_of_run(folder), folder / RESULTS
        embedding = vector_type(folder, job) if vectors else None
        found = {**_COLUMNS, **_answer_columns(log, job)}
        if embedding is not None:
            found[EMBEDDING] = Column(VECTOR, (EMBEDDING,))
        if job.scoring.is_on:
            found["prediction"] = Column("string", ("prediction",))
            for name in score_names(job.scoring):
                found[f"scores.{name}"] = Column("double", ("scores", name))
        for name, column in _step_columns(job).items():
            found[free_name(name, "steps.", found)] = column
        for name, kind in parsed_columns(log, job).items():
            found[free_name(name, "parsed.", found)] = Column(kind, ("parsed", name))
        for name in kept_fields(job) if fields else ():
            found[free_name(name, "fields.", found)] = Column("string", ("fields", name))
        return cls(found, embedding)


def free_name(name: str, prefix: str, taken: Container[str]) -> str:
    """``name`` with the prefix as often as it takes."""
    while name in taken:
        name = f"{prefix}{name}"
    return name


def vector_type(folder: Path, job: JobConfig) -> VectorType | None:
    """The type of the vectors that the newest records name; None if the job's task is not embed."""
    if job.task != "embed":
        return None
    vectors = Vectors(folder)
    types = {vectors.type_of(number) for number in segments_of(folder)} - {None}
    if len(types) == 1:
        return types.pop()
    # Also where a segment is missing, or one is that of older records alone.
    named = (record.get(EMBEDDING) for record in read_newest(folder / RESULTS))
    lengths = {place["dimensions"] for place in named if place is not None}
    return VectorType(job.output.vector_dtype, lengths.pop() if len(lengths) == 1 else None)


_COLUMNS = {
    "index": Column("int64", ("index",)),
    "id": Column("string", ("id",)),
    "status": Column("string", ("status",)),
    "attempt": Column("int32", ("attempt",)),
    "text": Column("string", ("text",)),
    "finish_reason": Column("string", ("finish_reason",)),
    "prompt_tokens": Column("int64", ("usage", "prompt_tokens")),
    "completion_tokens": Column("int64", ("usage", "completion_tokens")),
    "latency_s": Column("double", ("latency_s",)),
    "finished_at": Column("string", ("finished_at",)),
    "error_kind": Column("string", ("error", "kind")),
    "error_type": Column("string", ("error", "type")),
    "error_message": Column("string", ("error", "message")),
    "choices": Column("string", ("choices",)),
    "prompt": Column("string", ("prompt",)),
    "truncated_tokens": Column("int64", ("truncated_tokens",)),
}
_REASONING = {
    "reasoning": Column("string", ("reasoning",)),
    "reasoning_tokens": Column("int64", ("usage", "reasoning_tokens")),
}
_TOOL_CALLS = {"tool_calls": Column("string", ("tool_calls",))}
_GENERATIONS = {"generations": Column("int64", ("generations",))}
_SELECTED = {"selected": Column("int64", ("selected",))}
_VOTES = {"votes": Column("string", ("votes",))}
_CLASSES = {
    "label": Column("string", ("label",)),
    "probabilities": Column("list<double>", ("probabilities",)),
}
_SCORE = {"score": Column("double", ("score",))}
_SCORES = {
    "score": Column("list<double>", ("score",)),
    "order": Column("list<int64>", ("order",)),
}


def _answer_columns(log: Path, job: JobConfig) -> dict[str, Column]:
    """Those for what the job's answers hold besides text. Of ``task = "score"``, ``score`` holds lists if a row
    gave a list of documents."""
    if job.task == "classify":
        return _CLASSES
    if job.task == "score":
        return _SCORES if any("order" in record for record in read_newest(log)) else _SCORE
    if job.task == "embed":
        return {}
    by = job.select.by
    engine, is_server = job.engine, job.engine.kind == "openai-server"
    return {
        **(_REASONING if is_server or engine.reasoning_parser is not None else {}),
        **(_TOOL_CALLS if is_server or engine.tool_call_parser is not None else {}),
        **(_GENERATIONS if job.has_several else {}),
        **(_SELECTED if by is not None else {}),
        **(_VOTES if by == "majority" else {}),
    }


def _step_columns(job: JobConfig) -> dict[str, Column]:
    """Of each of ``[[steps]]`` its text, and its prediction and its scores if it has them; null where
    it was skipped."""
    found = {step.name: Column("string", ("steps", step.name, "text")) for step in job.steps}
    for step in job.steps:
        of_step = {}
        if step.scoring.is_on:
            of_step["prediction"] = Column("string", ("steps", step.name, "prediction"))
        for score in score_names(step.scoring):
            of_step[score] = Column("double", ("steps", step.name, "scores", score))
        for part, column in of_step.items():
            found[free_name(f"{step.name}_{part}", "steps.", found)] = column
    return found
