"""Asks the process that decodes sound and video (``clip_child``): a hostile clip may crash FFmpeg, or never end."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from batchkit.config.installation import how_to_install
from batchkit.isolation.files import Reader, ask_about

_READER = Reader(
    handler="batchkit.isolation.clip_child",
    task="decoding sound and video",
    library="FFmpeg",
    remedy="save it anew, for example by ffmpeg",
    timeout_s=60.0,
)
"""It has this long, and as long as the clip takes to play."""


def missing_package() -> str | None:
    """What to install, if sound and video can't be decoded here."""
    if find_spec("av") is not None:
        return None
    return f"sound and video need PyAV: {how_to_install('media')}"


def ask(what: str, place: str, *arguments: Any, memory_bytes: int, seconds: float = 0) -> Any:
    """The answer of ``clip_child`` about the clip at ``place``, which plays for so many ``seconds``; it has
    ``memory_bytes`` for that.

    Raises as ``ask_about``.
    """
    reader = _READER._replace(timeout_s=_READER.timeout_s + seconds)
    return ask_about(reader, (what, place, arguments, memory_bytes), memory_bytes)
