"""A hash of a row's fields: it shows whether a later input holds the row that was answered."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import orjson

from batchkit.sources.pictures import is_picture, look_of


def input_hash(fields: Mapping[str, Any]) -> str:
    """16 hex digits that are the same for rows with equal fields."""
    try:
        line = orjson.dumps(
            fields, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS, default=_hashable
        )
    except TypeError:  # a key or number that JSON can't hold, hundreds of levels, or anything
        # that a value's own code raises
        line = _as_text(fields).encode("utf-8", "backslashreplace")
    return hashlib.blake2b(line, digest_size=8).hexdigest()


def _hashable(value: Any) -> str:
    """A text for a value that JSON has no type for; a picture or an array by its content."""
    if isinstance(value, bytes | bytearray | memoryview):
        return hashlib.blake2b(value).hexdigest()
    if hasattr(value, "tobytes"):  # PIL, numpy: their repr is an address, or leaves out the middle
        look = look_of(value) if is_picture(value) else ""
        size = getattr(value, "size", None), getattr(value, "shape", None)
        return f"{type(value).__name__} {size} {hashlib.blake2b(value.tobytes()).hexdigest()}{look}"
    return repr(value)


def _as_text(fields: Mapping[str, Any]) -> str:
    try:
        return repr(sorted(fields.items(), key=lambda field: str(field[0])))
    except RecursionError:
        return f"nested too deeply: {sorted(map(str, fields))}"
    except Exception:  # a number of more than 4,300 digits, or an object that can't be shown
        return repr(_in_hex(fields))


def _in_hex(value: Any) -> Any:
    if isinstance(value, Mapping):
        return sorted((str(_in_hex(key)), _in_hex(part)) for key, part in value.items())
    if isinstance(value, list | tuple):
        return [_in_hex(part) for part in value]
    if isinstance(value, int):
        return hex(value)
    try:
        return _hashable(value)
    except Exception:  # its own code runs here
        return f"({type(value).__name__})"
