"""What is wrong with a job, in plain words: pydantic's errors, one line per key."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel

from batchkit.config.suggest import did_you_mean
from batchkit.config.terminal import shortened
from batchkit.config.type_names import in_words

Model = type[BaseModel]


class _Place(NamedTuple):
    """Where in a job a value is, its type with its limits, and the keys of the table that it is in."""

    location: tuple[Any, ...]
    annotation: Any
    limits: Sequence[Any] = ()
    known: Sequence[str] = ()


def problems_in(details: Iterable[Mapping[str, Any]], job: Model, tables: Any) -> list[str]:
    """One line per key; pydantic reports an error for every member of a union. ``tables``: what is no
    ``job``; it has the names of the steps."""
    lines: dict[tuple[Any, ...], str] = {}
    for detail in details:
        place = _place(job, detail["loc"])
        key = ".".join(map(_printed, _with_name_of_step(place.location, tables)))
        lines.setdefault(place.location, f"{key}: " * bool(key) + _problem(detail, place, job))
    return list(lines.values())


def annotation_of(job: Model, parts: Iterable[Any]) -> Any:
    """The type of a dotted key, or None if any key is allowed there (``vars``, ``options``). Within a
    list of tables, a part is a number or a name."""
    return _place(job, parts).annotation


def homes_of(job: Model, key: str) -> list[str]:
    """The dotted keys of the job's tables whose last part is ``key``."""
    tables = {name: _table_in(field.annotation) for name, field in job.model_fields.items()}
    return [
        f"{name}.{key}" for name, table in tables.items() if table and key in table.model_fields
    ]


def shown(value: Any) -> str:
    return shortened(json.dumps(value, default=str, ensure_ascii=False))


def _place(job: Model, parts: Iterable[Any]) -> _Place:
    """The place that ``parts`` name; members of unions, which pydantic puts between, are passed over."""
    place = _Place((), job)
    for part in parts:
        if (table := _table_in(place.annotation)) is not None:
            field = table.model_fields.get(part)
            annotation, limits = (None, []) if field is None else (field.annotation, field.metadata)
            place = _Place((*place.location, part), annotation, limits, [*table.model_fields])
        elif (entry := _entry(place.annotation)) is not None and (
            isinstance(part, int) or _table_in(entry) is not None
        ):
            place = _Place((*place.location, part), entry)
        elif isinstance(part, int):
            place = _Place((*place.location, part), None)
    return place


def _table_in(annotation: Any) -> Model | None:
    """The table that a value of this type is; None if it is not a table."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (list, dict):
        return None
    return next(filter(None, map(_table_in, get_args(annotation))), None)


def _entry(annotation: Any) -> Any:
    """The type of the values of a list, or of a dict of tables; of a union, of the list in it."""
    for part in (annotation, *get_args(annotation)):
        if get_origin(part) in (list, dict):
            return get_args(part)[-1]
    return None


def _with_name_of_step(location: tuple[Any, ...], tables: Any) -> tuple[Any, ...]:
    """``location`` with the name of a step, if it has one of its own, in place of its number."""
    if location[:1] != ("steps",) or len(location) < 2 or not isinstance(tables, Mapping):
        return location
    names = [step.get("name") if isinstance(step, Mapping) else None for step in tables["steps"]]
    name = names[location[1]]
    is_good = isinstance(name, str) and name.isidentifier() and names.count(name) == 1
    return ("steps", name, *location[2:]) if is_good else location


def _printed(part: Any) -> str:
    """A key on one line, whatever characters are in it."""
    text = str(part)
    return text if text.isprintable() else repr(text)[1:-1]


def _problem(detail: Mapping[str, Any], place: _Place, job: Model) -> str:
    """What one of pydantic's error details says about the key at ``place``."""
    kind, found = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        return f"unknown key{_hint(place, found, job)}"
    if kind == "missing":
        return f"this {'table' if len(place.location) == 1 else 'key'} is missing"
    if kind == "value_error":
        return str(detail["msg"]).removeprefix("Value error, ")
    hint = did_you_mean(str(found), _literals(place.annotation))
    return f"found {shown(found)}, expected {in_words(place.annotation, place.limits)}{hint}"


def _hint(place: _Place, found: Any, job: Model) -> str:
    """What an unknown key with the value ``found`` probably should have been."""
    key = str(place.location[-1])
    homes = homes_of(job, key)
    if isinstance(found, list) and all(isinstance(part, Mapping) for part in found):
        homes = [
            home for home in homes if "tables" in in_words(annotation_of(job, home.split(".")))
        ]
    if homes:
        return f"; did you mean {' or '.join(map(repr, homes))}?"
    if near := did_you_mean(key, place.known):
        return near
    hint = f"; known: {', '.join(place.known)}"
    if len(place.location) == 1 or place.location[0] in ("engine", "engines"):
        hint += "; vLLM's options belong in [engine.options], its sampling parameters in [sampling]"
    return hint


def _literals(annotation: Any) -> list[str]:
    parts = get_args(annotation)
    if get_origin(annotation) is Literal:
        return [str(part) for part in parts]
    return [choice for part in parts for choice in _literals(part)]
