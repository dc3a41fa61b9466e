"""The columns of a table of records.

Some columns exist for every record, some only for certain jobs. Each key of parsed answers (``output.parse``), or of
dicts returned by a ``[rollout]`` function, has a column.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from batchkit.config.answer_schema import resolved, schema_in
from batchkit.config.seams import is_deferred
from batchkit.config.tables import OF_TOKENS, WITH_VECTORS, JobConfig
from batchkit.scoring import kept_fields, score_names, scorers_of
from batchkit.storage.job_toml import job_of_run
from batchkit.storage.lines import whole_record
from batchkit.storage.log import RESULTS
from batchkit.storage.newest_lines import NewestLog, read_newest
from batchkit.storage.starts import read_history
from batchkit.storage.vectors import Vectors, VectorType, segments_of

EMBEDDING = "embedding"
VECTOR, MATRIX = "vector", "matrix"
_MOST_COLUMNS = 1_000  # an answer may use names or dates as keys
_TEXT = "string"  # also the type of all other values, as JSON
_UNKNOWN = "null"
_OF_SCHEMA = {"string": _TEXT, "integer": "int64", "number": "double", "boolean": "bool"}


class Column(NamedTuple):
    """A column: its Arrow type (or ``VECTOR``, ``MATRIX``), and the path of keys to its value in a record."""

    type: str
    keys: tuple[str, ...]


class Layout(NamedTuple):
    """The columns of a table of records by name, in order. ``embedding``: the type of the vectors; None without
    vectors."""

    columns: Mapping[str, Column]
    embedding: VectorType | None = None

    @classmethod
    def of(cls, folder: Path, fields: Iterable[str] = (), *, vectors: bool = True) -> Layout:
        """Return the columns of a run: the id, ``fields`` of the input, then the run's results.

        The job decides the columns, so every export of a run has the same ones. Only columns of parsed answers and of
        scores also depend on the answers. If two columns have the same name, one of them gets the prefix ``fields.``,
        ``parsed.`` or ``steps.``, repeated until its name is free.

        ``vectors``: False leaves the vectors out.
        """
        job, log = job_of_run(folder), folder / RESULTS
        embedding = vector_type(folder, job) if vectors else None
        scores = [*score_names(job.scoring), *read_history(folder).judged]
        kinds = _parsed_columns(log, job).items()
        parsed = {name: Column(kind, ("parsed", name)) for name, kind in kinds}
        return cls._made(job, fields, embedding, _answer_columns(log, job), scores, parsed)

    @classmethod
    def of_parts(cls, job: JobConfig) -> Layout:
        """Return the columns of the parts of a run (``parts.py``). They do not depend on the answers, which come later.

        Differences from ``of``: only input columns that the records keep, and scores that are computed with each row;
        vectors are lists of any length; a parsed answer is one column with JSON.
        """
        embedding = VectorType(job.output.vector_dtype, None) if job.may_have_vectors else None
        scores = [name for name in scorers_of(job.scoring) if not is_deferred(name)]
        parsed = {"parsed": Column(_TEXT, ("parsed",))} if _parses(job) else {}
        answers = _answer_columns(None, job)
        return cls._made(job, kept_fields(job), embedding, answers, scores, parsed)

    @classmethod
    def _made(
        cls,
        job: JobConfig,
        fields: Iterable[str],
        embedding: VectorType | None,
        of_answers: Mapping[str, Column],
        scores: Iterable[str],
        parsed: Mapping[str, Column],
    ) -> Layout:
        found = {**_COLUMNS, **of_answers}
        if job.prompt.lora is not None:
            found |= _LORA
        if embedding is not None:
            found[EMBEDDING] = Column(MATRIX if job.task in OF_TOKENS else VECTOR, (EMBEDDING,))
        if job.scoring.is_on:
            found["prediction"] = Column("string", ("prediction",))
        for name in scores:
            found[f"scores.{name}"] = Column("double", ("scores", name))
        for name, column in _step_columns(job).items():
            found[free_name(name, "steps.", found)] = column
        for name, column in parsed.items():
            found[free_name(name, "parsed.", found)] = column
        first = {name: found.pop(name) for name in ("index", "id")}
        for name in fields if job.input.id != "id" else [name for name in fields if name != "id"]:
            first[free_name(name, "fields.", {**first, **found})] = Column(
                "string", ("fields", name)
            )
        return cls({**first, **found}, embedding)


def free_name(name: str, prefix: str, taken: Container[str]) -> str:
    """Return ``name`` with the ``prefix`` repeated before it until the result is not in ``taken``."""
    while name in taken:
        name = f"{prefix}{name}"
    return name


def vector_type(folder: Path, job: JobConfig) -> VectorType | None:
    """Return the type of the vectors in the newest records; None if the run has no vectors.

    A job with ``task = "score"`` may have vectors, too, because lines of a batch file may ask for them.
    """
    segments = segments_of(folder) if job.may_have_vectors else []
    if job.task not in WITH_VECTORS and not segments:
        return None
    vectors = Vectors(folder)
    types = {vectors.type_of(number) for number in segments} - {None}
    if len(types) == 1:
        return types.pop()
    # The segments do not decide, for example because one is missing or only older records use it. Read the log.
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
_TRANSCRIPT = {
    "seconds": Column("double", ("seconds",)),
    "segments": Column("string", ("segments",)),
    "missing_s": Column("double", ("coverage", "missing_s")),
    "language": Column("string", ("language",)),
}
_SELECTED = {"selected": Column("int64", ("selected",))}
_VOTES = {"votes": Column("string", ("votes",))}
_LORA = {"lora": Column("string", ("lora",))}
_CLASSES = {
    "label": Column("string", ("label",)),
    "probabilities": Column("list<double>", ("probabilities",)),
}
_ENTITIES = {"entities": Column("string", ("entities",))}
_SCORE = {"score": Column("double", ("score",))}
_SCORES = {
    "score": Column("list<double>", ("score",)),
    "order": Column("list<int64>", ("order",)),
}


def _answer_columns(log: Path | None, job: JobConfig) -> dict[str, Column]:
    """Return the columns for parts of an answer other than its text. ``log``: None for columns that fit every answer
    that the job may get."""
    if not job.generates:
        return _pooled_columns(log, job)
    if job.task == "transcribe":
        return {**_GENERATIONS, **_TRANSCRIPT}
    by = job.select.by
    engine, is_server = job.engine, job.engine.kind == "openai-server"
    return {
        **(_REASONING if is_server or engine.reasoning_parser is not None else {}),
        **(_TOOL_CALLS if is_server or engine.tool_call_parser is not None else {}),
        **(_GENERATIONS if job.has_several else {}),
        **(_SELECTED if by is not None else {}),
        **(_VOTES if by == "majority" else {}),
    }


def _pooled_columns(log: Path | None, job: JobConfig) -> dict[str, Column]:
    """Return the columns for the job's pooling task, and for other tasks that occur in a batch file.

    ``score`` is a column of lists if a row had a list of documents. ``log``: as in ``_answer_columns``.
    """
    found: set[str] = set()
    if log is None:
        found = {"order"} if job.task == "score" else set()
        found |= {"label", "score", "order"} if job.may_have_lines else set()
    elif job.task == "score" or job.may_have_lines:
        for record in read_newest(log):
            found |= record.keys() & {"label", "score", "order"}
    has_scores = job.task == "score" or "score" in found
    return {
        **(_CLASSES if job.task == "classify" or "label" in found else {}),
        **((_SCORES if "order" in found else _SCORE) if has_scores else {}),
        **(_ENTITIES if job.task == "token_classify" else {}),
    }


def _step_columns(job: JobConfig) -> dict[str, Column]:
    """Return the columns of each of ``[[steps]]``: its text; if it is scored, also its prediction and scores.

    The columns are null in rows for which the step was skipped.
    """
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


def _parsed_columns(log: Path, job: JobConfig) -> dict[str, str]:
    """Return the Arrow type of each key of the parsed answers: keys of the schema first, then others as they occur.

    Strings, numbers and booleans keep their type, also in lists. Any other value becomes JSON text. Keys after the
    first 1,000 get no column.
    """
    if not _parses(job):
        return {}
    last = _answering(job)
    found = dict(_of_schema(schema_in(last.sampling.params()))) if last.output.parse else {}
    for parsed in _parsed(log):
        for key, value in parsed.items():
            if key in found:
                found[key] = _common(found[key], _type_of(value))
            elif len(found) < _MOST_COLUMNS:
                found[key] = _type_of(value)
    return {key: kind.replace(_UNKNOWN, _TEXT) for key, kind in found.items()}


def _parses(job: JobConfig) -> bool:
    """Return True if the records of the job may have parsed answers."""
    parse = _answering(job).output.parse
    return bool(parse or job.rollout or any(step.parse for step in job.steps))


def _answering(job: JobConfig) -> JobConfig:
    """Return the job of the step that gives the row's answer."""
    answering = [step for step in job.steps if step.answer and step.name != job.select.step]
    return job.of_step(answering[-1]) if answering else job


def _parsed(log: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the parsed answers that are JSON objects."""
    with closing(NewestLog(log)) as newest:
        for line in newest:
            if newest.view.find(b'"parsed":', line.start, line.end) >= 0:
                record = whole_record(newest.view[line.start : line.end], log, line.start)
                if isinstance(parsed := record.get("parsed"), Mapping):
                    yield parsed


def _type_of(value: Any) -> str:
    match value:
        case None:
            return _UNKNOWN
        case bool():
            return "bool"
        case int() if -(2**63) <= value < 2**63:
            return "int64"
        case float():
            return "double"
        case list():
            inner = _UNKNOWN
            for each in value:
                if isinstance(each, list | Mapping):
                    return _TEXT
                inner = _common(inner, _type_of(each))
            return _list_of(inner, value)
    return _TEXT


def _list_of(inner: str, values: list[Any]) -> str:
    is_mixed = inner == _TEXT and not all(isinstance(v, str | None) for v in values)
    return _TEXT if is_mixed else f"list<{inner}>"


def _common(one: str, other: str) -> str:
    """Return the type of a column that has values of the types ``one`` and ``other``."""
    if one == other or other == _UNKNOWN:
        return one
    if one == _UNKNOWN:
        return other
    if {one, other} == {"int64", "double"}:
        return "double"
    if one.startswith("list<") and other.startswith("list<"):
        inners = one[5:-1], other[5:-1]
        inner = _common(*inners)
        if inner != _TEXT or _UNKNOWN in inners:
            return f"list<{inner}>"
    return _TEXT


def _of_schema(schema: Any) -> Iterator[tuple[str, str]]:
    """Yield each key of the JSON ``schema`` with its Arrow type, or unknown if it is not a simple type."""
    found = resolved(schema, schema)
    for key, of_key in (found.get("properties") or {}).items():
        yield str(key), _type_in(resolved(of_key, schema), schema)


def _type_in(schema: Mapping[str, Any], root: Any) -> str:
    """Return the Arrow type of the only JSON type that ``schema`` allows besides null, or unknown."""
    options = [schema, *(resolved(each, root) for each in schema.get("anyOf") or ())]
    named = [kind if isinstance(kind := each.get("type"), list) else [kind] for each in options]
    kinds = {str(kind) for kinds in named for kind in kinds} - {"None", "null"}
    if len(kinds) != 1:
        return _UNKNOWN
    (kind,) = kinds
    if kind == "array":
        items: Any = next((option["items"] for option in options if "items" in option), None)
        inner = _OF_SCHEMA.get(str(resolved(items, root).get("type")))
        return _UNKNOWN if inner is None else f"list<{inner}>"
    return _OF_SCHEMA.get(kind, _TEXT)
