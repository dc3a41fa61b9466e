"""A hash of a row's fields, which shows whether a later input contains the same row.

PIL images in rows from Python are detected by their methods, so that PIL need not be imported.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

_EXIF_ORIENTATION = 0x0112

# Pillow decodes an opened file at its first use, and marks it as decoded before the pixels are
# there. Rows may share such an image, and render threads run concurrently: without a lock, some of
# them would see a part of the picture. A fixed set of locks serves all images, so none must be freed.
_LOCKS = [threading.Lock() for _ in range(64)]


def input_hash(fields: Mapping[str, Any]) -> str:
    """Return 16 hex digits that are equal for rows with equal fields. The order of the fields does not matter.

    Within a field, the order of keys matters, because a prompt may show it.
    """
    in_order = {name: fields[name] for name in _in_order(tuple(fields))}
    try:
        content = _ENCODER.encode(in_order)
    # An integer beyond 64 bits, invalid Unicode, or an error in a value's own code.
    except Exception:
        content = _ENCODER.encode(hashable(in_order))
    return hashlib.blake2b(content, digest_size=8).hexdigest()


@lru_cache(maxsize=64)  # most rows have the same fields
def _in_order(names: tuple[Any, ...]) -> Sequence[Any]:
    return sorted(names, key=str)


def content_of(value: Any) -> Any:
    """Return the full content of a value that has no JSON type. ``repr`` is the last choice, because it may be an
    address or leave out content."""
    kind = type(value).__name__
    if isinstance(value, Mapping):
        return dict(value)
    if is_picture(value):
        return [kind, value.size, _look_of(value), _digest(value)]
    if hasattr(value, "tobytes") and hasattr(value, "dtype"):  # numpy's
        is_of_objects = value.dtype.hasobject  # its bytes would be addresses
        content = value.tolist() if is_of_objects else _digest(value)
        return [kind, str(value.dtype), value.shape, content]
    if hasattr(value, "samples"):  # a clip
        return [kind, value.sample_rate, _digest(value.samples)]
    for name in ("to_dict", "to_list", "__array__"):  # tables, columns and tensors
        if hasattr(value, name):
            return [kind, getattr(value, name)()]
    return repr(value)


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(value.tobytes(), digest_size=16).digest()


def hashable(value: Any) -> Any:
    """Return ``value`` in types that the encoder accepts."""
    if isinstance(value, Mapping):
        return [[hashable(key), hashable(part)] for key, part in value.items()]
    if isinstance(value, list | tuple):
        return [hashable(part) for part in value]
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace")
    if value is None or isinstance(value, bool | float | bytes):
        return value
    if isinstance(value, int):
        return hex(value)
    try:
        return hashable(content_of(value))
    except Exception:  # the value's own code runs here
        return f"({type(value).__name__})"


def is_picture(value: Any) -> bool:
    return hasattr(value, "getexif") and hasattr(value, "tobytes")


def has_bytes(value: Any) -> bool:
    """Return True if ``value`` is, or contains, bytes or a PIL image, as columns of images do. Hugging Face datasets
    have ``{"bytes": …, "path": …}`` for an image."""
    if isinstance(value, dict | list):
        return any(map(has_bytes, value.values() if isinstance(value, dict) else value))
    return isinstance(value, bytes) or is_picture(value)


def loaded(picture: Any) -> int | None:
    """Decode the PIL image ``picture`` and return its EXIF orientation (``orientation_of``).

    Threads that share an image wait for each other. Raises Pillow's exceptions for a broken file.
    """
    with _LOCKS[id(picture) // 16 % len(_LOCKS)]:
        picture.load()
        return orientation_of(picture)


def orientation_of(picture: Any) -> int | None:
    """Return the EXIF orientation of a picture, 1 to 8, or None."""
    try:
        orientation = picture.getexif().get(_EXIF_ORIENTATION)
    except Exception:  # broken EXIF raises anything; the pixels are usable, without rotation
        return None
    return orientation if isinstance(orientation, int) else None


def _look_of(picture: Any) -> list[Any]:
    """Return the attributes that decide how a picture looks, in addition to its bytes."""
    orientation, mode = loaded(picture), picture.mode
    palette = bytes(picture.getpalette("RGBA") or ()) if mode in ("P", "PA") else b""
    return [mode, palette, repr(picture.info.get("transparency")), orientation]


_ENCODER = msgspec.msgpack.Encoder(enc_hook=content_of)
