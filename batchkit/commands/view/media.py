"""Images and clips for the web page. Images become small WebP files; a report stores each image once."""

from __future__ import annotations

import base64
import hashlib
import io
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from PIL import Image

from batchkit.config.tables import MediaTable
from batchkit.errors import MediaError
from batchkit.rendering.media import media_type
from batchkit.rendering.media.source import shown
from batchkit.runs.reach import Reach

MAX_CLIP_BYTES = 500_000  # of a clip that is embedded in a page
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


class PlayableClip(NamedTuple):
    """An encoded clip that browsers can play. ``type``: the media type, always ``audio/…`` or ``video/…``."""

    content: bytes
    type: str

    @property
    def uri(self) -> str:
        return f"data:{self.type};base64,{base64.b64encode(self.content).decode()}"

    def answer(self, asked: str | None) -> tuple[int, bytes, dict[str, str]]:
        """Return status, content and headers of the response. ``asked``: the request's Range header, or None. Several
        ranges, or an invalid one, give the whole content (RFC 9110, section 14.2)."""
        headers, size = {"accept-ranges": "bytes"}, len(self.content)
        if (found := _RANGE.fullmatch(asked or "")) is None or found[0] == "bytes=-":
            return 200, self.content, headers
        first, last = found[1], found[2]
        start = int(first) if first else max(0, size - int(last))
        end = min(int(last), size - 1) if first and last else size - 1
        if start > end:
            return 416, b"", {**headers, "content-range": f"bytes */{size}"}
        headers["content-range"] = f"bytes {start}-{end}/{size}"
        return 206, self.content[start : end + 1], headers


def clip_of(kind: str, source: Any, reach: Reach) -> PlayableClip:
    """Return the clip at ``source`` without decoding it. Only files that ``reach`` allows are opened.

    Raises:
        MediaError: The clip can't be read, must not be opened, or browsers can't play it.
    """
    content = reach.clip(source)
    if (name := media_type(kind, content)) is None:
        raise MediaError(f"{shown(source, kind)}: browsers don't play this kind of file")
    return PlayableClip(content, name)


MAX_PICTURES = 2_000
MAX_TOTAL_BYTES = 15 * 2**20  # base64 adds a third
MAX_PICTURE_BYTES = 20_000
# The first one that fits is used; if none fits, the image is made smaller.
_QUALITIES = (85, 70, 45, 25)


class MediaLimits(NamedTuple):
    """The limits of an image on the page: its longer side, its pixels, and its bytes as WebP."""

    side: int
    pixels: int
    max_bytes: int

    def of(self, media: MediaTable) -> MediaTable:
        """Return a copy of ``media`` that limits decoded images to ``pixels``, or to the limit of ``media`` if that is
        lower."""
        pixels = min(media.max_pixels, self.pixels)
        return media.model_copy(update={"max_pixels": pixels, "min_pixels": 0})


THUMB = MediaLimits(side=240, pixels=60_000, max_bytes=8_000)
SMALL = MediaLimits(side=720, pixels=420_000, max_bytes=MAX_PICTURE_BYTES)
LARGE = MediaLimits(side=3_000, pixels=3_000_000, max_bytes=4 << 20)


class Webp(NamedTuple):
    """An image encoded as WebP, with its size in pixels."""

    content: bytes
    width: int
    height: int

    @property
    def uri(self) -> str:
        return "data:image/webp;base64," + base64.b64encode(self.content).decode()


def as_webp(source: Any, reach: Reach, limits: MediaLimits) -> Webp:
    """Return the image at ``source``, made small enough for ``limits``. Only files that ``reach`` allows are opened.

    Raises:
        MediaError: There is no image, it can't be opened, or it must not be opened.
    """
    image = reach.image(source, limits.of(reach.job.media))
    image.thumbnail((limits.side, limits.side))
    try:
        return _encoded(image, limits.max_bytes)
    except (OSError, ValueError) as error:  # for example a size that WebP does not support
        raise MediaError(f"{shown(source)}: {error}") from error


def still_as_webp(source: Any, reach: Reach, limits: MediaLimits) -> Webp:
    """Return a frame from near the middle of the video at ``source``. Raises the same exceptions as ``as_webp``."""
    return _encoded(reach.still(source, limits.side), limits.max_bytes)


def _encoded(image: Image.Image, max_bytes: int) -> Webp:
    while True:
        for quality in _QUALITIES:
            file = io.BytesIO()
            image.save(file, "WEBP", quality=quality, method=2)
            if file.tell() <= max_bytes or max(image.size) < 64:
                return Webp(file.getvalue(), *image.size)
        image = image.resize((max(1, image.width * 3 // 4), max(1, image.height * 3 // 4)))


class Pictures:
    """The images of a report. ``found``: for each image {name, src, w, h}, with a data: URI, or {name, problem}."""

    def __init__(self, reach: Reach) -> None:
        self.found: list[dict[str, Any]] = []
        self._reach = reach
        self._numbers: dict[str, int] = {}
        self._room = MAX_TOTAL_BYTES

    def add(self, source: Any) -> int:
        """Add the image at ``source`` unless it is there already. Return its number in ``found``."""
        key = hashlib.sha256(repr(source).encode(errors="replace")).hexdigest()
        if key not in self._numbers:
            self._numbers[key] = len(self.found)
            name = shown(source)
            self.found.append({"name": name, **self._made(source, name)})
        return self._numbers[key]

    def clip(self, kind: str, source: Any) -> Mapping[str, Any]:
        """Return {kind, name, src} for a clip; a video also has a "poster" frame. ``src`` and ``poster`` are data:
        URIs. A clip that can't be read, or is too long for the page or its remaining space, has a "problem" instead."""
        name, found = shown(source, kind), dict[str, str]()
        try:
            made = clip_of(kind, source, self._reach)
            is_short = len(made.content) <= MAX_CLIP_BYTES
            too_long = {"problem": f"{name}: too long for this page; `batchkit view` plays it"}
            found = {"src": made.uri} if is_short else too_long
        except MediaError as error:
            found = {"problem": str(error)}
        if kind == "video":
            with suppress(MediaError):
                found["poster"] = still_as_webp(source, self._reach, SMALL).uri
        self._room -= len(found.get("src", "")) + len(found.get("poster", ""))
        if self._room < 0:
            found = {"problem": "left out: the page holds no more clips"}
        return {"kind": kind, "name": name, **found}

    def _made(self, source: Any, name: str) -> dict[str, Any]:
        if len(self.found) >= MAX_PICTURES or self._room < MAX_PICTURE_BYTES:
            return {"problem": "left out: the page holds no more images"}
        try:
            made = as_webp(source, self._reach, SMALL)
        except MediaError as error:
            problem = str(error)
            return {"problem": problem if name in problem else f"{name}: {problem}"}
        self._room -= len(made.content)
        return {"src": made.uri, "w": made.width, "h": made.height}
