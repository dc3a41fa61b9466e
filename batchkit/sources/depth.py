"""How deeply values may be nested: the code that later walks over a row recurses once per level."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

MAX_DEPTH = 200
TOO_DEEP = f"nested more than {MAX_DEPTH} levels deep; flatten it"

_FLAT = {str, int, float, bool, type(None), bytes}  # most values; none of them is nested


class TooDeepError(Exception):
    """A value is nested more than MAX_DEPTH levels deep."""


def is_too_deep(value: Any) -> bool:
    """Whether lists and mappings are nested more than MAX_DEPTH deep, or contain themselves."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [part for part in level if isinstance(part, dict | list | tuple | Mapping)]
        if not level:
            return False
        level = list({id(inner): inner for part in level for inner in _inside(part)}.values())
    return True


def _inside(part: Any) -> Any:
    return part.values() if isinstance(part, Mapping) else part


def copied(value: Any, levels: int = MAX_DEPTH) -> Any:
    """A copy of ``value``'s dicts, lists and tuples; of a subclass, only the outermost level
    is copied, and a value of another type is the same object.
    Arrays of one dimension, which pandas makes of a Parquet file's lists, become lists.

    Raises:
        TooDeepError: they are nested more than ``levels`` deep.
    """
    kind = type(value)
    if kind in _FLAT:
        return value
    if kind.__name__ == "ndarray" and value.ndim == 1 and value.dtype.kind not in "mM":
        value, kind = value.tolist(), list  # but of times: their numbers
    if kind is not dict and kind is not list and kind is not tuple:
        if is_too_deep(value):
            raise TooDeepError
        return copy(value) if isinstance(value, dict | list) else value
    if not levels:
        raise TooDeepError
    if kind is dict:
        return {key: copied(part, levels - 1) for key, part in value.items()}
    return kind(copied(part, levels - 1) for part in value)
