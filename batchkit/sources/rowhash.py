"""A hash of a row's fields: it shows whether a later input holds the row that was answered."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from batchkit.sources.pictures import is_picture, look_of


def input_hash(fields: Mapping[str, Any]) -> str:
    """16 hex digits that are the same for rows with equal fields, whatever the order of the fields.

    Within a field the order of keys counts: a prompt may show it.
    """
    in_order = dict(sorted(fields.items(), key=lambda field: str(field[0])))
    try:
        content = _ENCODER.encode(in_order)
    except Exception:  # an integer beyond 64 bits, text that is not Unicode, or a value's own code
        content = _ENCODER.encode(_plain(in_order))
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _content(value: Any) -> Any:
    """What a value of another type than JSON's holds: of a picture, an array or a table, all of it,
    since their ``repr`` is an address or leaves out the middle."""
    kind = type(value).__name__
    if isinstance(value, Mapping):
        return dict(value)
    if is_picture(value):
        return [kind, value.size, look_of(value), _digest(value)]
    if hasattr(value, "tobytes") and hasattr(value, "dtype"):  # numpy's
        is_of_objects = value.dtype.hasobject  # whose bytes are addresses
        content = value.tolist() if is_of_objects else _digest(value)
        return [kind, str(value.dtype), value.shape, content]
    for name in ("to_dict", "to_list", "__array__"):  # tables, columns and tensors
        if hasattr(value, name):
            return [kind, getattr(value, name)()]
    return repr(value)


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(value.tobytes(), digest_size=16).digest()


def _plain(value: Any) -> Any:
    """``value`` as the encoder takes it, whatever it is."""
    if isinstance(value, Mapping):
        return [[_plain(key), _plain(part)] for key, part in value.items()]
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace")
    if value is None or isinstance(value, bool | float | bytes):
        return value
    if isinstance(value, int):
        return hex(value)
    try:
        return _plain(_content(value))
    except Exception:  # its own code runs here
        return f"({type(value).__name__})"


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_content)
