"""PIL images in rows from Python: recognised by their methods, so that PIL is not imported."""

from __future__ import annotations

import threading
from typing import Any

_EXIF_ORIENTATION = 0x0112

# Pillow decodes an opened file at its first use, and marks it as decoded before the pixels are
# there. Rows may share such an image, and render threads run concurrently: without a lock, all but
# one of them would see a part of the picture. A few locks serve all images, so none is freed.
_LOCKS = [threading.Lock() for _ in range(64)]


def is_picture(value: Any) -> bool:
    return hasattr(value, "getexif") and hasattr(value, "tobytes")


def loaded(picture: Any) -> int | None:
    """Decode ``picture``, one thread at a time; returns its orientation, see ``orientation_of``.

    Raises what Pillow raises for a broken file.
    """
    with _LOCKS[id(picture) // 16 % len(_LOCKS)]:
        picture.load()
        return orientation_of(picture)


def orientation_of(picture: Any) -> int | None:
    """The EXIF orientation of a picture, 1 to 8, or None."""
    try:
        orientation = picture.getexif().get(_EXIF_ORIENTATION)
    except Exception:  # broken EXIF raises anything; the pixels are good, and are not rotated
        return None
    return orientation if isinstance(orientation, int) else None


def look_of(picture: Any) -> list[Any]:
    """What decides how a picture's bytes look."""
    orientation, mode = loaded(picture), picture.mode
    palette = bytes(picture.getpalette("RGBA") or ()) if mode in ("P", "PA") else b""
    return [mode, palette, repr(picture.info.get("transparency")), orientation]
