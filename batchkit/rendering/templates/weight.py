"""The size of a template's input: the text in a row's fields, and the parts of its lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

_OF_PART = 8
_NUMBERS = frozenset({int, float, bool, type(None)})


def is_heavier(values: Iterable[Any], most: int) -> bool:
    """Whether ``values`` hold more than ``most`` characters and bytes, at any depth.

    Each part of a list counts, whatever it is, so this also ends for a list that contains itself.
    """
    left = most
    waiting: list[Iterable[Any]] = [values]
    while waiting:
        for value in waiting.pop():
            kind = type(value)
            left -= _OF_PART
            if kind is str or kind is bytes:
                left -= len(value)
            elif kind is dict:
                waiting += (value, value.values())
            elif kind is list:
                waiting.append(value)
            elif kind not in _NUMBERS:
                left -= _text_in(value)
                waiting += _parts_of(value)
            if left < 0:
                return True
    return False


def _text_in(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | bytearray) else 0


def _parts_of(value: Any) -> list[Iterable[Any]]:
    if isinstance(value, Mapping):
        return [value, value.values()]
    return [value] if isinstance(value, list | tuple | Set) else []
