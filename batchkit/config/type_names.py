"""The type of a job file's key, in words: for its errors and for docs/job-file.md."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from batchkit.config.seams import Seam


def in_words(annotation: Any, limits: Iterable[Any] = ()) -> str:
    """The type of a key for people: "whole number ≥ 1", "list of text"."""
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
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "table"
    if (seam := next((limit for limit in limits if isinstance(limit, Seam)), None)) is not None:
        return _either([json.dumps(name) for name in (*seam.also, *seam.own)])
    word = {bool: "true or false", int: "whole number", float: "number", str: "text"}
    bounds = " and ".join(_bounds(annotation, limits))
    return f"{word[annotation]} {bounds}".rstrip()


def _member(part: Any) -> list[str]:
    """The choices that a member of a union adds."""
    if part is bool:
        return ["true", "false"]
    return [] if part is NoneType else [in_words(part)]


def _bounds(number: type, limits: Iterable[Any]) -> Iterator[str]:
    for limit in limits:
        if isinstance(limit, FieldInfo):
            yield from _bounds(number, limit.metadata)
        if pattern := getattr(limit, "pattern", None):
            yield f"matching {pattern}"
        for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
            bound = getattr(limit, name, None)
            if bound is not None and number is int and name == "gt":
                yield f"≥ {bound + 1}"
            elif bound is not None:
                yield f"{sign} {bound:g}"


def _either(choices: list[str]) -> str:
    *first, last = choices
    return f"{', '.join(first)} or {last}" if first else last
