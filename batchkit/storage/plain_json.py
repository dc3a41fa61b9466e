"""Writing any Python value as JSON, and reading JSON from other programs."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from datetime import date, time
from typing import Any

import orjson

_DEEPEST = 100  # orjson gives up at 254 levels, the record's own included
_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


def encoded(value: Any) -> bytes:
    """Return ``value`` as one line of JSON, newline included, even if JSON has no such type.

    - Bytes become base64, a set becomes a list, NaN and infinities become null.
    - An integer beyond 64 bits and any other type become text; a lone surrogate becomes ``?``.
    - If orjson can't write the value, anything nested deeper than 100 levels is replaced.
    """
    try:
        return orjson.dumps(value, option=_OPTIONS | orjson.OPT_APPEND_NEWLINE)
    except (TypeError, RecursionError):
        return orjson.dumps(_plain(value), option=orjson.OPT_APPEND_NEWLINE)


def parsed(content: bytes) -> Any:
    """Return the value of JSON that another program wrote. NaN, lone surrogates and huge integers are accepted.

    Raises:
        ValueError: ``content`` is not JSON, or is nested too deeply for Python's reader.
    """
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def valid(text: str) -> str:
    """Return ``text`` without lone surrogates, which UTF-8 can't encode."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _plain(value: Any, depth: int = 0) -> Any:
    """Return ``value`` in JSON's own types."""
    if isinstance(value, str):
        return valid(value)
    if isinstance(value, bool | None):
        return value
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**64 else _text(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode()
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        if depth > _DEEPEST:
            return "(nested too deeply)"
        if isinstance(value, Mapping):
            return {_key(key): _plain(part, depth + 1) for key, part in value.items()}
        return [_plain(part, depth + 1) for part in value]
    try:  # convert the value as ``encoded`` does if orjson can write the whole
        return orjson.loads(orjson.dumps(value, option=_OPTIONS))
    except (TypeError, RecursionError):
        return _text(value)


def _key(key: Any) -> str:
    if isinstance(key, str):
        return valid(key)
    try:
        return str(next(iter(orjson.loads(orjson.dumps({key: None}, option=_OPTIONS)))))
    except TypeError:
        return _text(key)


def _text(value: Any) -> str:
    try:
        return valid(str(value))
    except Exception:  # __str__ may raise anything; Python refuses integers of over 4,300 digits
        return f"({type(value).__name__})"
