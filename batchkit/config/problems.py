"""Readable descriptions of mistakes in a table: pydantic's errors as one line per key."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from batchkit.config.seams import Seam
from batchkit.config.suggest import called_here, did_you_mean
from batchkit.config.terminal import shortened

Model = type[BaseModel]
AT_THE_TOP = "at the top of the file, above the first [table]"
_PATTERNS = {
    r"^[A-Za-z0-9][A-Za-z0-9._-]*$": "of letters, digits, dots, _ and -, beginning with a letter or digit",
    r"^\s*\{\{.*\}\}\s*$": "like {{ column }}",
    r"^[A-Za-z_][A-Za-z0-9_]*$": "of letters, digits and _, beginning with no digit",
}


class _Place(NamedTuple):
    """A key of a job. ``location``: the key's dotted parts. ``annotation`` and ``limits``: the type and the limits of
    its value. ``known``: the valid keys of the table that contains this key."""

    location: tuple[Any, ...]
    annotation: Any
    limits: Sequence[Any] = ()
    known: Sequence[str] = ()


def problems_in(
    error: ValidationError, table: Model, values: Any, unknown: str = "unknown key"
) -> list[str]:
    """Return one line per wrong key of ``values``, which pydantic refused with ``error`` as a ``table``. Pydantic
    reports an error for every member of a union; only the first error per key is used. ``unknown``: the message for an
    unknown key."""
    lines: dict[tuple[Any, ...], str] = {}
    for detail in error.errors(include_url=False):
        place = _place(table, detail["loc"])
        key = ".".join(map(_printed, _with_name_of_step(place.location, values)))
        problem = _problem(detail, place, table, unknown)
        lines.setdefault(place.location, f"{key}: {problem}" if key else problem)
    return list(lines.values())


def annotation_of(job: Model, parts: Iterable[Any]) -> Any:
    """Return the type of the key whose dotted parts are ``parts``, or None if it is in a table that allows any key
    (``vars``, ``options``). For a list of tables, a part is an index or a name."""
    return _place(job, parts).annotation


def homes_of(job: Model, key: str) -> list[str]:
    """Return the dotted keys whose last part is ``key``: keys of top-level tables, and parameters of extractors and
    scorers. Messages use them to suggest where a misplaced key belongs."""
    homes = []
    for name, field in job.model_fields.items():
        fields = {} if (table := _table_in(field.annotation)) is None else table.model_fields
        homes += [f"{name}.{key}"] * (key in fields)
        homes += [
            f"{name}.{place}.{one}.{key}"
            for place, its in fields.items()
            if get_origin(its.annotation) is dict and (seam := _seam_in(its.metadata)) is not None
            for one in seam.documented
            if key in seam.parameters(one).model_fields
        ]
    return homes


def shown(value: Any) -> str:
    return shortened(json.dumps(value, default=str, ensure_ascii=False))


def in_words(annotation: Any, limits: Iterable[Any] = ()) -> str:
    """Describe a key's type, for example "whole number ≥ 1" or "list of text"."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return in_words(parts[0], parts[1:])
    if origin in (Union, UnionType):
        return _either([word for part in parts for word in _member(part)])
    if origin is Literal:
        return _either([json.dumps(choice) for choice in parts])
    if origin is list:
        return f"list of {in_words(parts[0])}".replace("of number", "of numbers").replace(
            "of table", "of tables"
        )
    if (seam := next((limit for limit in limits if isinstance(limit, Seam)), None)) is not None:
        names = _either([*map(json.dumps, seam.documented), *["table"] * (origin is dict)])
        return f"list of {names}" if origin is dict and seam.is_list else names
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "table"
    word = {bool: "true or false", int: "whole number", float: "number", str: "text"}
    bounds = " and ".join(_bounds(annotation, limits))
    return f"{word[annotation]} {bounds}".rstrip()


def _member(part: Any) -> list[str]:
    """Return the words for one member of a union type, for example "whole number"; [] for the type ``None``."""
    if part is bool:
        return ["true", "false"]
    return [] if part is NoneType else [in_words(part)]


def _bounds(number: type, limits: Iterable[Any]) -> Iterator[str]:
    for limit in limits:
        if isinstance(limit, FieldInfo):
            yield from _bounds(number, limit.metadata)
        if pattern := getattr(limit, "pattern", None):
            yield _PATTERNS.get(pattern, f"matching {pattern}")
        for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
            bound = getattr(limit, name, None)
            if bound is not None and number is int and name == "gt":
                yield f"≥ {bound + 1}"
            elif bound is not None:
                yield f"{sign} {bound:.10g}"


def _either(choices: list[str]) -> str:
    *first, last = choices
    return f"{', '.join(first)} or {last}" if first else last


def _place(job: Model, parts: Iterable[Any]) -> _Place:
    """Return the key whose dotted parts are ``parts``. Parts that pydantic inserts for members of a union are
    skipped."""
    place = _Place((), job)
    for part in parts:
        if (table := _table_in(place.annotation)) is not None:
            field = table.model_fields.get(part)
            annotation, limits = (None, []) if field is None else (field.annotation, field.metadata)
            place = _Place((*place.location, part), annotation, limits, [*table.model_fields])
        elif (seam := _seam_in((place.annotation, *place.limits))) is not None and seam.has(part):
            place = _Place((*place.location, part), seam.parameters(part))
        elif isinstance(part, int) or _table_in(_entry(place.annotation)) is not None:
            place = _Place((*place.location, part), _entry(place.annotation))
    return place


def _table_in(annotation: Any) -> Model | None:
    """Return the table class in ``annotation``, which may be a union. Return None if ``annotation`` has no table class,
    or has one only inside a list or a dict."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (list, dict):
        return None
    return next(filter(None, map(_table_in, get_args(annotation))), None)


def _seam_in(parts: Iterable[Any]) -> Seam | None:
    """Return the extension point (``Seam``) in ``parts``, which are parts of a type, at any depth; None if there is
    none."""
    for part in parts:
        found = part if isinstance(part, Seam) else _seam_in(get_args(part))
        if found is not None:
            return found
    return None


def _entry(annotation: Any) -> Any:
    """Return the type of the values in ``annotation``, a list or dict or a union with one; None for other types."""
    for part in (annotation, *get_args(annotation)):
        bare = get_args(part)[0] if get_origin(part) is Annotated else part
        if get_origin(bare) in (list, dict):
            return get_args(bare)[-1]
    return None


def _with_name_of_step(location: tuple[Any, ...], values: Any) -> tuple[Any, ...]:
    """Replace the index of a step in ``location`` with the step's name if the name is valid, because users know steps
    by name."""
    match location:
        case ("steps", int(number), *rest) if isinstance(step := values["steps"][number], Mapping):
            if isinstance(name := step.get("name"), str) and name.isidentifier():
                return ("steps", name, *rest)
    return location


def _printed(part: Any) -> str:
    """Return ``part`` of a key as text with control characters escaped, so that a message stays on one line."""
    text = str(part)
    return text if text.isprintable() else repr(text)[1:-1]


def _problem(detail: Mapping[str, Any], place: _Place, table: Model, unknown: str) -> str:
    """Describe one of pydantic's errors for the key at ``place``."""
    kind, found = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        return f"{unknown}{_hint(place, found, table)}"
    if kind == "missing":
        *_, above, name, key = ("", "", *place.location)
        hint = f"; write {{ {name} = {{ {key} = … }} }}" if above in ("extract", "scorers") else ""
        return f"this {'table' if len(place.location) == 1 else 'key'} is missing{hint}"
    if kind == "value_error":
        return str(detail["msg"]).removeprefix("Value error, ")
    hint = did_you_mean(str(found), _literals(place.annotation))
    is_value = isinstance(found, str) or len(place.location) == 1
    inner = _table_in(place.annotation)
    if is_value and inner is not None and (names := inner.model_fields):
        key = "user" if "user" in names else next(iter(names))
        hint = f"; set one of its keys, for example {place.location[-1]}.{key}"
    expected = in_words(place.annotation, place.limits)
    if isinstance(found, str) and expected.startswith("list of text"):
        hint = f"; write [{shown(found)}]"
    elif isinstance(found, str) and str(place.location[-1]).endswith(("_s", "seconds")):
        hint = "; write the number of seconds"
    if expected == "list of tables" and isinstance(found, Mapping):
        hint = "; write [[{0}]] instead of [{0}]".format(".".join(map(str, place.location)))
    return f"found {shown(found)}, expected {expected}{hint}"


def _hint(place: _Place, found: Any, table: Model) -> str:
    """Return a suggestion for the unknown key at ``place``, whose value is ``found``: a similar name, the table that
    has such a key, or the known keys."""
    *tables, key = map(str, place.location)
    # The options of one engine, checked alone, are no job: other keys of the job are no suggestion there.
    is_job = "engine" in table.model_fields
    if is_job and (here := called_here(key, ".".join(tables))) is not None:
        return f"; did you mean {here!r}?"
    top = table.model_fields.get(key) if tables else None
    if top is not None and _table_in(top.annotation) is None:
        return f"; did you mean {key!r}, {AT_THE_TOP}?"
    is_list_of_tables = isinstance(found, list) and found and isinstance(found[0], Mapping)
    homes = [] if is_list_of_tables else homes_of(table, key)
    if homes and f"{key}s" not in place.known:
        return f"; did you mean {' or '.join(map(repr, homes))}?"
    if near := did_you_mean(key, place.known):
        return near
    hint = f"; known: {', '.join(place.known) or 'none'}"
    if "engine" in place.known or place.location[0] in ("engine", "engines"):
        hint += (
            "; put vLLM's options into [engine.options], its sampling parameters into [sampling]"
        )
    return hint


def _literals(annotation: Any) -> list[str]:
    parts = get_args(annotation)
    if get_origin(annotation) is Literal:
        return [str(part) for part in parts]
    return [choice for part in parts for choice in _literals(part)]
