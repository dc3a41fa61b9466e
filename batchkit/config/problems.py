"""What is wrong with a job, in plain words: pydantic's errors, one line per key."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from batchkit.config.suggest import did_you_mean
from batchkit.config.tables import JobConfig, Table
from batchkit.config.terminal import shortened
from batchkit.config.type_names import in_words


def problems_in(details: Iterable[Mapping[str, Any]]) -> list[str]:
    """One line per key; pydantic reports an error for every member of a union."""
    lines: dict[tuple[Any, ...], str] = {}
    for detail in details:
        location = _location(detail["loc"])
        key = f"{'.'.join(map(_printed, location))}: " if location else ""
        lines.setdefault(location, key + _problem(detail, location))
    return list(lines.values())


def _printed(part: Any) -> str:
    """A key on one line, whatever characters are in it."""
    text = str(part)
    return text if text.isprintable() else repr(text)[1:-1]


def _location(loc: Iterable[Any]) -> tuple[Any, ...]:
    """The keys and list positions of ``loc``, without the members of unions between them."""
    table: Any = JobConfig
    location: list[Any] = []
    for part in loc:
        if isinstance(part, int):
            location.append(part)
        elif table is not None:
            location.append(part)
            field = table.model_fields.get(part)
            table = _table_in(field.annotation) if field else None
    return tuple(location)


def _problem(detail: Mapping[str, Any], location: tuple[Any, ...]) -> str:
    """What one of pydantic's error details says about the key at ``location``."""
    kind, found = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        return f"unknown key{_hint(location)}"
    if kind == "missing":
        return f"this {'table' if len(location) == 1 else 'key'} is missing"
    if kind == "value_error":
        return str(detail["msg"]).removeprefix("Value error, ")
    annotation, limits = _type(location)
    expected = in_words(annotation, limits)
    hint = did_you_mean(str(found), _literals(annotation))
    return f"found {shown(found)}, expected {expected}{hint}"


def _hint(location: tuple[Any, ...]) -> str:
    """What an unknown key at ``location`` probably should have been."""
    key, known = str(location[-1]), _known_keys(location[:-1])
    if homes := homes_of(key):
        return f"; did you mean {' or '.join(map(repr, homes))}?"
    if near := did_you_mean(key, known):
        return near
    hint = f"; known: {', '.join(known)}"
    if len(location) == 1 or location[0] == "engine":
        hint += "; vLLM's options belong in [engine.options], its sampling parameters in [sampling]"
    return hint


def homes_of(key: str) -> list[str]:
    """The dotted keys of the job's tables whose last part is ``key``."""
    tables = {name: _table_in(field.annotation) for name, field in JobConfig.model_fields.items()}
    return [
        f"{name}.{key}" for name, table in tables.items() if table and key in table.model_fields
    ]


def _known_keys(location: Iterable[Any]) -> list[str]:
    keys = [part for part in location if isinstance(part, str)]
    return list(getattr(_table_in(annotation_of(keys)), "model_fields", {}))


def _type(location: tuple[Any, ...]) -> tuple[Any, Sequence[Any]]:
    """The type and limits of the key at ``location``, or of a member of the list there."""
    keys = [part for part in location if isinstance(part, str)]
    table = _table_in(annotation_of(keys[:-1]))
    assert table is not None  # a problem is always at a key of a table
    field = table.model_fields[keys[-1]]
    if location[-1] == keys[-1]:
        return field.annotation, field.metadata
    lists = [field.annotation, *get_args(field.annotation)]
    return next(get_args(part)[0] for part in lists if get_origin(part) is list), ()


def _literals(annotation: Any) -> list[str]:
    parts = get_args(annotation)
    if get_origin(annotation) is Literal:
        return [str(part) for part in parts]
    return [choice for part in parts for choice in _literals(part)]


def annotation_of(parts: Iterable[str]) -> Any:
    """The type of a dotted key, or None if any key is allowed there (``vars``, ``options``)."""
    annotation: Any = JobConfig
    for part in parts:
        fields = getattr(_table_in(annotation), "model_fields", {})
        if part not in fields:
            return None
        annotation = fields[part].annotation
    return annotation


def _table_in(annotation: Any) -> type[Table] | None:
    """The table that a value of this type is, or is a list of; None if it is not a table."""
    if isinstance(annotation, type) and issubclass(annotation, Table):
        return annotation
    return next(filter(None, map(_table_in, get_args(annotation))), None)


def shown(value: Any) -> str:
    return shortened(json.dumps(value, default=str, ensure_ascii=False))
