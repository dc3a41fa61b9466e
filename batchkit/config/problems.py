"""What is wrong with a job, in plain words: pydantic's errors, one line per key."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from batchkit.config.suggest import did_you_mean
from batchkit.config.tables import JobConfig, Table
from batchkit.config.terminal import shortened
from batchkit.config.type_names import in_words


def problems_in(details: Iterable[Mapping[str, Any]], tables: Any = None) -> list[str]:
    """One line per key; pydantic reports an error for every member of a union. ``tables``: the job
    that they are in, which has the names of its steps."""
    lines: dict[tuple[Any, ...], str] = {}
    for detail in details:
        location = _location(detail["loc"])
        key = ".".join(map(_printed, _with_name_of_step(location, tables)))
        lines.setdefault(location, f"{key}: " * bool(key) + _problem(detail, location))
    return list(lines.values())


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


def _location(loc: Iterable[Any]) -> tuple[Any, ...]:
    """The keys and list positions of ``loc``, without the members of unions between them."""
    annotation: Any = JobConfig
    location: list[Any] = []
    for part in loc:
        has_keys = _table_in(annotation) is not None or _entry(annotation) is not None
        if has_keys or isinstance(part, int):
            location.append(part)
            annotation = _below(annotation, part)
    return tuple(location)


def _problem(detail: Mapping[str, Any], location: tuple[Any, ...]) -> str:
    """What one of pydantic's error details says about the key at ``location``."""
    kind, found = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        return f"unknown key{_hint(location, found)}"
    if kind == "missing":
        return f"this {'table' if len(location) == 1 else 'key'} is missing"
    if kind == "value_error":
        return str(detail["msg"]).removeprefix("Value error, ")
    annotation, limits = _type(location)
    expected = in_words(annotation, limits)
    hint = did_you_mean(str(found), _literals(annotation))
    return f"found {shown(found)}, expected {expected}{hint}"


def _hint(location: tuple[Any, ...], found: Any) -> str:
    """What an unknown key at ``location``, with the value ``found``, probably should have been."""
    key, known = str(location[-1]), _known_keys(location[:-1])
    homes = homes_of(key)
    if isinstance(found, list) and all(isinstance(part, Mapping) for part in found):
        homes = [home for home in homes if "tables" in in_words(annotation_of(home.split(".")))]
    if homes:
        return f"; did you mean {' or '.join(map(repr, homes))}?"
    if near := did_you_mean(key, known):
        return near
    hint = f"; known: {', '.join(known)}"
    if len(location) == 1 or location[0] in ("engine", "engines"):
        hint += "; vLLM's options belong in [engine.options], its sampling parameters in [sampling]"
    return hint


def homes_of(key: str) -> list[str]:
    """The dotted keys of the job's tables whose last part is ``key``."""
    tables = {
        name: _table_in(field.annotation)
        for name, field in JobConfig.model_fields.items()
        if _entry(field.annotation) is None
    }
    return [
        f"{name}.{key}" for name, table in tables.items() if table and key in table.model_fields
    ]


def _known_keys(location: Iterable[Any]) -> list[str]:
    return list(getattr(_table_in(annotation_of(location)), "model_fields", {}))


def _type(location: tuple[Any, ...]) -> tuple[Any, Sequence[Any]]:
    """The type and limits of the key at ``location``, or of a member of the list there."""
    place = max(n for n, part in enumerate(location) if isinstance(part, str))
    table = _table_in(annotation_of(location[:place]))
    if table is None:  # it is a table, named by its key
        return annotation_of(location), ()
    field = table.model_fields[location[place]]
    if place == len(location) - 1:
        return field.annotation, field.metadata
    lists = [field.annotation, *get_args(field.annotation)]
    return next(get_args(part)[0] for part in lists if get_origin(part) is list), ()


def _literals(annotation: Any) -> list[str]:
    parts = get_args(annotation)
    if get_origin(annotation) is Literal:
        return [str(part) for part in parts]
    return [choice for part in parts for choice in _literals(part)]


def annotation_of(parts: Iterable[Any]) -> Any:
    """The type of a dotted key, or None if any key is allowed there (``vars``, ``options``). Within a
    list of tables, a part is a number or a name."""
    annotation: Any = JobConfig
    for part in parts:
        annotation = _below(annotation, part)
    return annotation


def _below(annotation: Any, part: Any) -> Any:
    """The type of what ``part`` names in a value of the type ``annotation``; None if it has none."""
    if (entry := _entry(annotation)) is not None:
        return entry
    field = getattr(_table_in(annotation), "model_fields", {}).get(part)
    return None if field is None else field.annotation


def _entry(annotation: Any) -> type[Table] | None:
    """The table that is each value of a list, or of a dict, of tables."""
    return _table_in(get_args(annotation)[-1]) if get_origin(annotation) in (list, dict) else None


def _table_in(annotation: Any) -> type[Table] | None:
    """The table that a value of this type is; None if it is not a table."""
    if isinstance(annotation, type) and issubclass(annotation, Table):
        return annotation
    if get_origin(annotation) in (list, dict):
        return None
    return next(filter(None, map(_table_in, get_args(annotation))), None)


def shown(value: Any) -> str:
    return shortened(json.dumps(value, default=str, ensure_ascii=False))
