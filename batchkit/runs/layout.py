"""The columns of a table of records: those of every record, and those that only some jobs have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from batchkit.config.tables import JobConfig
from batchkit.runs.parsed_columns import parsed_columns
from batchkit.runs.vector_column import PLACE, vector_type
from batchkit.scoring import kept_fields, score_names
from batchkit.storage.job_toml import job_of_run
from batchkit.storage.log import RESULTS
from batchkit.storage.newest import read_newest
from batchkit.storage.vectors import VectorType


class Column(NamedTuple):
    """Its Arrow type, and the keys of its value in a record."""

    type: str
    keys: tuple[str, ...]


class Layout(NamedTuple):
    """The columns of a table of records besides those of every record.

    ``answer``: those for what the job's answers hold besides text.
    ``embedding``: the type of the vectors; None: no column for them.
    ``scores``: one column ``scores.<name>`` each, and one for the prediction; None: not scored.
    ``steps``: those of ``[[steps]]``. ``keep``: the kept fields, as text. ``parsed``: the type of each
    key of the parsed answers. A field, a key or a step with the name of another column gets the prefix
    ``fields.``, ``parsed.`` or ``steps.`` until its name is free.
    """

    scores: Sequence[str] | None
    keep: Sequence[str]
    parsed: Mapping[str, str] = MappingProxyType({})
    embedding: VectorType | None = None
    answer: Mapping[str, Column] = MappingProxyType({})
    steps: Mapping[str, Column] = MappingProxyType({})

    @classmethod
    def of(cls, folder: Path) -> Layout:
        """Fixed by the job, so that every export of a run has the same columns; those of parsed
        answers and of scores also depend on the answers."""
        job = job_of_run(folder)
        scores = score_names(job.scoring) if job.scoring.is_on else None
        parsed = parsed_columns(folder / RESULTS, job)
        answer = answer_columns(folder / RESULTS, job)
        vectors = vector_type(folder, job)
        return cls(scores, kept_fields(job), parsed, vectors, answer, step_columns(job))

    def columns(self) -> dict[str, str]:
        """The columns' names and Arrow types, in order; for a vector, those that name its place."""
        found = {name: column.type for name, column in {**_COLUMNS, **self.answer}.items()}
        if self.embedding is not None:
            found |= dict.fromkeys(PLACE, "int64")
        if self.scores is not None:
            found |= {"prediction": "string"}
            found |= {f"scores.{name}": "double" for name in self.scores}
        steps = {name: column.type for name, column in self.steps.items()}
        fields = dict.fromkeys(self.keep, "string")
        for prefix, columns in (("steps.", steps), ("parsed.", self.parsed), ("fields.", fields)):
            for name, kind in columns.items():
                while name in found:
                    name = f"{prefix}{name}"
                found[name] = kind
        return found

    def paths(self) -> list[tuple[str, ...]]:
        """The keys of each column's value in a record, in the order of ``columns``."""
        found = [column.keys for column in {**_COLUMNS, **self.answer}.values()]
        if self.embedding is not None:
            found += PLACE.values()
        if self.scores is not None:
            found += [("prediction",), *(("scores", name) for name in self.scores)]
        found += [column.keys for column in self.steps.values()]
        found += [("parsed", name) for name in self.parsed]
        return found + [("fields", name) for name in self.keep]


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


def answer_columns(log: Path, job: JobConfig) -> dict[str, Column]:
    """By name. Of ``task = "score"``, ``score`` holds lists if a row gave a list of documents."""
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


def step_columns(job: JobConfig) -> dict[str, Column]:
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
            name = f"{step.name}_{part}"
            while name in found:
                name = f"steps.{name}"
            found[name] = column
    return found
