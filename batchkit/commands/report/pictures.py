"""Thumbnails: each image of a run once, so small that a thousand fit into one page."""

from __future__ import annotations

import base64
import hashlib
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from batchkit.commands.view.images import Limits, as_webp
from batchkit.config.tables import MediaTable
from batchkit.errors import MediaError
from batchkit.rendering.media import shown

MAX_PICTURES = 2_000
MAX_TOTAL_BYTES = 15 * 2**20  # base64 adds a third
MAX_PICTURE_BYTES = 20_000
_SMALL = Limits(side=720, pixels=420_000, max_bytes=MAX_PICTURE_BYTES)
_THREADS = 4
_WAITING = 16  # sources that wait for a thread: image bytes must not accumulate
_TOO_MANY = "left out: the page holds no more images"


class Picture(NamedTuple):
    """``uri`` is a data: URI; it is empty if there is none, and ``problem`` says why."""

    name: str
    uri: str = ""
    width: int = 0
    height: int = 0
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        if self.problem:
            return {"name": self.name, "problem": self.problem}
        return {"name": self.name, "src": self.uri, "w": self.width, "h": self.height}


class Pictures:
    """Makes thumbnails while the rows are read; used as a context manager. ``add`` may be called from
    one thread only."""

    def __init__(self, media: MediaTable) -> None:
        self._media = media
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
        key = _key(source)
        if key not in self._numbers:
            self._numbers[key] = len(self._found)
            self._found.append(self._begin(source))
        return self._numbers[key]

    def finish(self) -> list[Picture]:
        """All pictures by number; those beyond the page's budget have no image."""
        done, total = [], 0
        for found in self._found:
            picture = found.result() if isinstance(found, Future) else found
            total += len(picture.uri) * 3 // 4
            if picture.uri and total > MAX_TOTAL_BYTES:
                picture = Picture(picture.name, problem=_TOO_MANY)
            done.append(picture)
        return done

    def _begin(self, source: Any) -> Future[Picture] | Picture:
        if len(self._found) >= MAX_PICTURES:
            return Picture(shown(source), problem=_TOO_MANY)
        self._room.acquire()
        future = self._pool.submit(self._make, source)
        future.add_done_callback(lambda _: self._room.release())
        return future

    def _make(self, source: Any) -> Picture:
        name = shown(source)
        try:
            made = as_webp(source, self._media, _SMALL)
        except MediaError as error:
            problem = str(error)
            return Picture(name, problem=problem if name in problem else f"{name}: {problem}")
        uri = "data:image/webp;base64," + base64.b64encode(made.content).decode()
        return Picture(name, uri, made.width, made.height)


def _key(source: Any) -> str:
    """Equal for equal sources."""
    match source:
        case str() | os.PathLike():
            content = str(source).encode(errors="surrogatepass")
        case bytes() | bytearray() | memoryview() as content:
            pass
        case {"bytes": bytes(content)}:
            pass
        case _:
            content = repr(source).encode()
    return hashlib.sha256(content).hexdigest()
