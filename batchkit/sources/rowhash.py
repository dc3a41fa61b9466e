"""Tells whether a row of a later input is the one that was answered."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import orjson


def input_hash(fields: Mapping[str, Any]) -> str:
    """16 hex digits that are the same for rows with equal fields."""
    try:
        line = orjson.dumps(
            fields, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS, default=_hashable
        )
    except TypeError:  # a key or a number that JSON has no word for, or hundreds of levels
        line = _as_text(fields).encode("utf-8", "backslashreplace")
    return hashlib.blake2b(line, digest_size=8).hexdigest()


def _hashable(value: Any) -> str:
    """What stands for a value that JSON has no word for; a picture or an array by its content."""
    if isinstance(value, bytes | bytearray | memoryview):
        return hashlib.blake2b(value).hexdigest()
    if hasattr(value, "tobytes"):  # PIL, numpy: their repr is an address, or leaves out the middle
        size = getattr(value, "size", None), getattr(value, "shape", None)
        return f"{type(value).__name__} {size} {hashlib.blake2b(value.tobytes()).hexdigest()}"
    return repr(value)


def _as_text(fields: Mapping[str, Any]) -> str:
    try:
        return repr(sorted(fields.items(), key=lambda field: str(field[0])))
    except ValueError:  # a number of more than 4,300 digits
        return repr(_in_hex(fields))
    except RecursionError:
        return f"nested too deeply: {sorted(map(str, fields))}"


def _in_hex(value: Any) -> Any:
    if isinstance(value, Mapping):
        return sorted((str(_in_hex(key)), _in_hex(part)) for key, part in value.items())
    if isinstance(value, list | tuple):
        return [_in_hex(part) for part in value]
    return hex(value) if isinstance(value, int) else _hashable(value)
