"""The size of a row's values: their text and bytes, and the parts of their lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

_OF_PART = 8
_NUMBERS = frozenset({int, float, bool, type(None)})


def size_of(values: Iterable[Any], most: int) -> int:
    """Characters and bytes that ``values`` hold, at any depth; if more than ``most``, some number
    above it.

    Each part of a list counts, whatever it is, so this also ends for a list that contains itself.
    """
    size = 0
    waiting: list[Iterable[Any]] = [values]
    while waiting:
        for value in waiting.pop():
            kind = type(value)
            size += _OF_PART
            if kind is str or kind is bytes:
                size += len(value)
            elif kind is dict:
                waiting += (value, value.values())
            elif kind is list:
                waiting.append(value)
            elif kind not in _NUMBERS:
                size += _bytes_in(value)
                waiting += _parts_of(value)
            if size > most:
                return size
    return size


def _bytes_in(value: Any) -> int:
    """Of a text, or of an array of NumPy's or another library's."""
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    try:
        n_bytes = value.nbytes
    except Exception:  # the value's own code runs here
        return 0
    return n_bytes if isinstance(n_bytes, int) else 0


def _parts_of(value: Any) -> list[Iterable[Any]]:
    if isinstance(value, Mapping):
        return [value, value.values()]
    return [value] if isinstance(value, list | tuple | Set) else []
