"""Thumbnails: each image of a run once, so small that a thousand fit into one page."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from PIL import Image

from batchkit.config.tables import MediaTable
from batchkit.errors import MediaError
from batchkit.rendering.media import load_image

MAX_PICTURES = 2_000
MAX_TOTAL_BYTES = 15 * 2**20  # base64 adds a third
MAX_PICTURE_BYTES = 20_000
MAX_SIDE = 720
_MAX_PIXELS = 420_000
_QUALITIES = (70, 45, 25)  # the first that fits; if none does, the picture is made smaller
_THREADS = 4
_WAITING = 16  # sources that wait for a thread: image bytes must not accumulate


class Picture(NamedTuple):
    """``uri`` is a data: URI; None if there is none, and ``problem`` says why."""

    name: str
    uri: str | None
    width: int = 0
    height: int = 0
    problem: str | None = None

    def to_json(self) -> dict[str, Any]:
        found = {"name": self.name, "src": self.uri, "problem": self.problem}
        size = {"w": self.width, "h": self.height} if self.uri else {}
        return {key: value for key, value in found.items() if value is not None} | size


class Pictures:
    """Makes thumbnails while the rows are read; used as a context manager.

    ``media`` is the job's: nothing is opened here that the run would have refused. The network is
    only read if the media root is a URL. ``add`` may be called from one thread only.
    """

    def __init__(self, media: MediaTable) -> None:
        small = {"max_pixels": _MAX_PIXELS, "min_pixels": 0}
        self._media = media.model_copy(update=small)
        threads = min(_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="thumbnail")
        self._room = threading.BoundedSemaphore(_WAITING)  # acquired by add, released by a thread
        self._numbers: dict[str, int] = {}
        self._found: list[Future[Picture] | Picture] = []

    def __enter__(self) -> Pictures:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def add(self, source: Any) -> int:
        """The number of the picture of ``source``, the same for an equal source."""
        name, key = _named(source)
        if key not in self._numbers:
            self._numbers[key] = len(self._found)
            self._found.append(self._begin(name, source))
        return self._numbers[key]

    def finish(self) -> list[Picture]:
        """All pictures by number; those beyond the page's budget have no image."""
        done, total = [], 0
        for found in self._found:
            picture = found.result() if isinstance(found, Future) else found
            total += len(picture.uri or "") * 3 // 4
            if picture.uri and total > MAX_TOTAL_BYTES:
                picture = Picture(picture.name, None, problem=_TOO_MANY)
            done.append(picture)
        return done

    def _begin(self, name: str, source: Any) -> Future[Picture] | Picture:
        if len(self._found) >= MAX_PICTURES:
            return Picture(name, None, problem=_TOO_MANY)
        if isinstance(source, str) and source[:8].lower().startswith(("http://", "https://")):
            return Picture(name, None, problem="a report fetches nothing from the network")
        self._room.acquire()
        future = self._pool.submit(self._make, name, source)
        future.add_done_callback(lambda _: self._room.release())
        return future

    def _make(self, name: str, source: Any) -> Picture:
        try:
            image = load_image(source, self._media)
            image.thumbnail((MAX_SIDE, MAX_SIDE))
            data, size = _encode(image)
        except (MediaError, OSError, ValueError) as error:  # ValueError: an odd size for WebP
            return Picture(name, None, problem=str(error))
        uri = "data:image/webp;base64," + base64.b64encode(data).decode()
        return Picture(name, uri, *size)


_TOO_MANY = "left out: the page holds no more images"


def _encode(image: Image.Image) -> tuple[bytes, tuple[int, int]]:
    """WebP of at most ``MAX_PICTURE_BYTES``, and its size."""
    while True:
        for quality in _QUALITIES:
            file = io.BytesIO()
            image.save(file, "WEBP", quality=quality, method=2)
            if file.tell() <= MAX_PICTURE_BYTES or max(image.size) < 64:
                return file.getvalue(), image.size
        image = image.resize((max(1, image.width * 3 // 4), max(1, image.height * 3 // 4)))


def _named(source: Any) -> tuple[str, str]:
    """The name of a picture, and a key that is equal for equal sources."""
    match source:
        case bytes() | bytearray() | memoryview():
            return f"{len(source):,} bytes", _digest(bytes(source))
        case {"bytes": bytes(data)}:
            path = source.get("path")
            return path if isinstance(path, str) else f"{len(data):,} bytes", _digest(data)
        case {"path": str(path)}:
            return path, f"path {path}"
        case str() if source[:5].lower() == "data:":
            return f"data: URI, {len(source):,} characters", _digest(source.encode())
        case str() | os.PathLike():
            return os.fspath(source), f"path {os.fspath(source)}"
    name = "?" if isinstance(source, Mapping) else type(source).__name__
    return name, _digest(repr(source).encode())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
