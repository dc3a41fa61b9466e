"""A hash of a row's fields: it shows whether a later input holds the row that was answered."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from itertools import chain
from math import isfinite
from typing import Any

import orjson

from batchkit.sources.pictures import is_picture, look_of

_LABELS = ("columns", "column_names", "index", "name", "dtype", "dtypes")  # of a table's content


def input_hash(fields: Mapping[str, Any]) -> str:
    """16 hex digits that are the same for rows with equal fields, whatever the order of the fields.

    Within a field the order of keys counts: a prompt may show it.
    """
    return next(_hashes(fields))


def known_hashes(fields: Mapping[str, Any], *, nan_is_null: bool = True) -> tuple[str, ...]:
    """``input_hash``, and the one of earlier versions if that differs: no order of keys counted
    there, and NaN was null. That one is left out unless ``nan_is_null``: it may be another row's."""
    first, *earlier = _hashes(fields)
    if earlier and not nan_is_null and _has_non_finite(fields):
        return (first,)
    return (first, *earlier)


def _hashes(fields: Mapping[str, Any]) -> Iterator[str]:
    try:
        line = _json(fields, orjson.OPT_SORT_KEYS)
    except TypeError:  # a key or number that JSON can't hold, hundreds of levels, or anything
        # that a value's own code raises
        yield _hash(_as_text(fields))
        return
    if b"null" in line and _has_non_finite(fields):
        yield _hash(_as_text(fields))
    elif line.find(b"{", 1) > 0 and any(map(_has_order, fields.values())):
        in_order = sorted(fields.items(), key=lambda field: str(field[0]))
        yield _hash(_json(dict(in_order)), b"in order")  # never equal to an earlier version's
    yield _hash(line)


def _json(fields: Mapping[str, Any], option: int = 0) -> bytes:
    return orjson.dumps(fields, option=option | orjson.OPT_NON_STR_KEYS, default=_hashable)


def _hash(line: bytes | str, kind: bytes = b"") -> str:
    if isinstance(line, str):
        line = line.encode("utf-8", "backslashreplace")
    return hashlib.blake2b(line, digest_size=8, person=kind).hexdigest()


def _has_order(value: Any) -> bool:
    """Whether ``value`` has a table of several keys."""
    if isinstance(value, dict):
        return len(value) > 1 or any(map(_has_order, value.values()))
    return isinstance(value, list | tuple) and any(map(_has_order, value))


def _has_non_finite(value: Any) -> bool:
    """Whether ``value``, which orjson has taken, has a NaN or an infinity: orjson writes null."""
    if value is None or isinstance(value, str | int):  # first, since most values are one of these
        return False
    if isinstance(value, float):
        return not isfinite(value)
    if isinstance(value, dict):
        return any(map(_has_non_finite, chain(value, value.values())))
    if isinstance(value, list | tuple):
        return any(map(_has_non_finite, value))
    return hasattr(value, "__array__") and _has_non_finite(_hashable(value))


def _hashable(value: Any) -> Any:
    """Plain values for one that JSON has no type for; a picture or an array by its content."""
    if isinstance(value, bytes | bytearray | memoryview):
        return hashlib.blake2b(value).hexdigest()
    if hasattr(value, "tobytes"):  # PIL, numpy: their repr is an address, or leaves out the middle
        return _of_pixels_or_numbers(value)
    if hasattr(value, "__array__"):  # a DataFrame, a tensor: their repr leaves out the middle, too
        labels = [getattr(value, name, None) for name in _LABELS]
        content = value.tolist() if hasattr(value, "tolist") else value.__array__()
        return [type(value).__name__, [None if callable(it) else it for it in labels], content]
    return repr(value)


def _of_pixels_or_numbers(value: Any) -> Any:
    look = look_of(value) if is_picture(value) else ""
    kind, dtype = type(value).__name__, getattr(value, "dtype", None)
    if getattr(dtype, "hasobject", False):  # its bytes are addresses
        return [kind, str(dtype), value.shape, value.tolist()]
    if dtype is not None and str(dtype) != kind:  # equal bytes may be other numbers
        look = f" {dtype}"
    size = getattr(value, "size", None), getattr(value, "shape", None)
    return f"{kind} {size} {hashlib.blake2b(value.tobytes()).hexdigest()}{look}"


def _as_text(fields: Mapping[str, Any]) -> str:
    try:
        if _has_arrays(fields):
            return repr(_in_hex(fields))
        return repr(sorted(fields.items(), key=lambda field: str(field[0])))
    except RecursionError:
        return f"nested too deeply: {sorted(map(str, fields))}"
    except Exception:  # a number of more than 4,300 digits, or an object that can't be shown
        return repr(_in_hex(fields))


def _has_arrays(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_arrays, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_arrays, value))
    return hasattr(value, "tobytes") or hasattr(value, "__array__")


def _in_hex(value: Any) -> Any:
    if isinstance(value, Mapping):
        return sorted((str(_in_hex(key)), _in_hex(part)) for key, part in value.items())
    if isinstance(value, list | tuple):
        return [_in_hex(part) for part in value]
    if isinstance(value, int):
        return hex(value)
    try:
        plain = _hashable(value)
    except Exception:  # its own code runs here
        return f"({type(value).__name__})"
    return plain if isinstance(plain, str) else _in_hex(plain)
