"""The columns of a table of records that only some jobs have: what answers hold besides text."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from batchkit.config.tables import JobConfig
from batchkit.scoring import score_names
from batchkit.storage.newest import read_newest


class Column(NamedTuple):
    """Its Arrow type, and the keys of its value in a record."""

    type: str
    keys: tuple[str, ...]


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
