"""The columns of parsed answers (``output.parse``), or of the dicts that a function of ``[rollout]``
returned: a key each, with the type of its values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from batchkit.config.answer_schema import resolved, schema_in
from batchkit.config.tables import JobConfig
from batchkit.storage.lines import whole_record
from batchkit.storage.newest import NewestLog

_MOST_COLUMNS = 1_000  # an answer may use names or dates as keys
_TEXT = "string"  # also for what has no other type, as JSON
_UNKNOWN = "null"
_OF_SCHEMA = {"string": _TEXT, "integer": "int64", "number": "double", "boolean": "bool"}


def parsed_columns(log: Path, job: JobConfig) -> dict[str, str]:
    """The Arrow type of each key of the answers: those of the schema first, then as they come.

    Texts, numbers, true and false keep their type, also in a list; anything else is JSON as text.
    Keys past the first thousand have no column.
    """
    answering = [step for step in job.steps if step.answer and step.name != job.select.step]
    last = job.of_step(answering[-1]) if answering else job
    if not (last.output.parse or job.rollout or any(step.parse for step in job.steps)):
        return {}
    found = dict(_of_schema(schema_in(last.sampling.params()))) if last.output.parse else {}
    for parsed in _parsed(log):
        for key, value in parsed.items():
            if key in found:
                found[key] = _common(found[key], _type_of(value))
            elif len(found) < _MOST_COLUMNS:
                found[key] = _type_of(value)
    return {key: kind.replace(_UNKNOWN, _TEXT) for key, kind in found.items()}


def _parsed(log: Path) -> Iterator[Mapping[str, Any]]:
    """Those of all rows that are objects."""
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
    """The type of a column that has values of both."""
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
    """The keys that ``schema`` names, with their types as far as it says them plainly."""
    found = resolved(schema, schema)
    for key, of_key in (found.get("properties") or {}).items():
        yield str(key), _type_in(resolved(of_key, schema), schema)


def _type_in(schema: Mapping[str, Any], root: Any) -> str:
    options = [resolved(each, root) for each in schema.get("anyOf") or ()]
    named = schema.get("type") or [option.get("type") for option in options]
    kinds = {named} if isinstance(named, str) else {each for each in named if isinstance(each, str)}
    kinds.discard("null")
    if len(kinds) != 1:
        return _UNKNOWN
    (kind,) = kinds
    if kind == "array":
        items: Any = next((o["items"] for o in [schema, *options] if "items" in o), None)
        inner = _OF_SCHEMA.get(str(resolved(items, root).get("type")))
        return _UNKNOWN if inner is None else f"list<{inner}>"
    return _TEXT if kind == "object" else _OF_SCHEMA.get(kind, _UNKNOWN)
