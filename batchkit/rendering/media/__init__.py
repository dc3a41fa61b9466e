"""Loading of the images, sound, video and texts that a row names.

The entry points are ``load_image``, ``load_media`` and ``load_text``. The other modules:

- ``source`` reads a file below ``media.root``, which is a folder or an fsspec URL;
- ``download`` reads http(s) URLs of the hosts in ``media.allow_urls``;
- ``pixels`` decodes images;
- ``apart`` decodes PDFs, sound and video in a separate process.
"""

from __future__ import annotations

import os
import re
import threading
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar, cast
from weakref import WeakValueDictionary

from PIL import Image

from batchkit.config.tables import MediaTable
from batchkit.config.urls import is_remote
from batchkit.errors import MediaError
from batchkit.rendering.media.apart import decode_audio, decode_still, decode_video, page_image
from batchkit.rendering.media.pixels import decode, fit
from batchkit.rendering.media.source import (
    is_for_fetch,
    page_of,
    read_data_uri,
    read_file,
    read_remote,
    shown,
)
from batchkit.types import Clip, VideoFile

_BEGINNING = 8000  # bytes to search for a NUL, the sign of a binary file (git's rule)

_TYPES = {  # types that browsers play, by the file's first bytes; {kind} if a file may hold sound or video
    re.compile(rb"RIFF....WAVE", re.DOTALL): "audio/wav",
    re.compile(rb"fLaC"): "audio/flac",
    re.compile(rb"OggS"): "{kind}/ogg",
    re.compile(rb"....ftyp", re.DOTALL): "{kind}/mp4",
    re.compile(rb"\x1a\x45\xdf\xa3"): "{kind}/webm",
    re.compile(rb"ID3|\xff[\xe2-\xe7\xf2-\xf7\xfa-\xfd]"): "audio/mpeg",
    re.compile(rb"\xff[\xf0\xf1\xf8\xf9]"): "audio/aac",
}
_ARTICLES = {"audio": "sound", "video": "a video"}
_Shared = TypeVar("_Shared")

Media = Image.Image | Clip
Source = str | os.PathLike[str] | bytes | bytearray | memoryview | Mapping[str, Any] | Image.Image


def load_image(source: Source, media: MediaTable) -> Image.Image:
    """Return a new RGB image: fully decoded, turned upright by its EXIF orientation, and scaled to the limits of
    ``media``.

    ``source`` is one of

    - a path below ``media.root`` (absolute, relative to it, ``file://``, or, if the root is an fsspec URL, a URL that
      begins with it);
    - a base64 ``data:`` URI;
    - an http(s) URL on ``media.allow_urls``;
    - the bytes of an image file, or ``{"bytes": …, "path": …}`` as in Hugging Face datasets;
    - an image, which is not modified.

    Formats are recognized by content: PNG, JPEG, WebP, GIF, BMP and TIFF. An animation gives its first frame; a TIFF
    with several pages is refused. A PDF gives the page in ``#page=3`` after its path or URL, or its only page.
    Transparency becomes white; gray of more than 8 bits is scaled to 8, not clipped.

    Safe to call from many threads. Besides the result, one call needs at most this memory: ``media.max_decode_bytes``,
    twice ``media.max_bytes``, and 64 MiB. Each concurrent call in another thread adds at most 128 MiB and the bytes of
    its file, because images that need more than 128 MiB are decoded one at a time.

    Raises:
        MediaError: the image is missing, refused, too large, or not an image. No other exception is raised.
    """
    return cast("Image.Image", load_media("image", source, media))


def load_media(kind: str, source: Source, media: MediaTable) -> Media:
    """Return the decoded image, sound or video that ``source`` names. ``kind``: "image", "audio" or "video".

    ``source`` and the exceptions are as for ``load_image``, but sound and video can't come from a PDF page or a PIL
    image.
    """
    try:
        return _image(source, media) if kind == "image" else _clip(kind, source, media)
    except MediaError as error:
        message = str(error)
    # Raise a new error without a cause, because the stack frames of the first error would keep the file's bytes and its
    # pixels in memory until the failed row has its record.
    raise MediaError(message)


def load_text(path: str, media: MediaTable) -> str:
    """Return the text of the file at ``path``, below ``media.root``; invalid UTF-8 becomes U+FFFD.

    Raises:
        MediaError: the file is missing, outside ``media.root``, over ``media.max_bytes``, or not text (UTF-16 is
            refused, too). No other exception is raised.
    """
    data = _read(path, shown(path), media)
    if data.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        raise MediaError(f"{shown(path)}: is UTF-16 text; save the file as UTF-8")
    if b"\0" in data[:_BEGINNING]:
        raise MediaError(f"{shown(path)}: is not text: it has NUL bytes; save it as text, in UTF-8")
    return data.decode("utf-8-sig", errors="replace")


def load_bytes(source: object, media: MediaTable) -> bytes:
    """Return the bytes of the file at the path ``source``, below ``media.root``.

    Raises:
        MediaError: as for ``load_text``; or ``source`` is not a path, for example a web address.
    """
    name = shown(source)
    if not isinstance(source, str) or is_for_fetch(source, media):
        raise MediaError(f"{name}: is not the path of a file; give a path below media.root")
    return _read(page_of(source)[0], name, media)


def load_clip_bytes(source: Source, media: MediaTable) -> bytes:
    """Return the bytes of an audio or video file, without decoding it.

    Raises:
        MediaError: as for ``load_media``.
    """
    name = shown(source, "clip")
    data = _data_of(source, name, media)
    if data is None:
        raise MediaError(
            f"{name}: is not an audio or video file; give its path, URL, data: URI or bytes"
        )
    return data


def load_for_server(kind: str, source: Source, media: MediaTable) -> Media:
    """Return media in the form for a server: a video as an encoded file, other media decoded as by ``load_media``.

    If ``media_type`` does not know the format of a video, its type is "video/mp4".
    """
    if kind != "video" or isinstance(source, VideoFile):
        return load_media(kind, source, media)
    data = load_clip_bytes(source, media)
    return VideoFile(data, media_type("video", data) or "video/mp4")


def media_type(kind: str, data: bytes) -> str | None:
    """Return the MIME type of sound or video, found by the first bytes of ``data``; None for a format that browsers
    don't play."""
    names = (name for mark, name in _TYPES.items() if mark.match(data[:64]))
    return next((name.format(kind=kind) for name in names), None)


def load_still(source: Source, side: int, media: MediaTable) -> Image.Image:
    """Return a frame near the middle of a video, scaled so that no side is longer than ``side`` pixels. Raises
    MediaError as for ``load_media``."""
    return decode_still(load_clip_bytes(source, media), shown(source, "video"), side, media)


def _clip(kind: str, source: Source, media: MediaTable) -> Clip:
    if isinstance(source, Clip):
        return source
    name = shown(source, kind)
    data = _data_of(source, name, media)
    if data is None:
        raise MediaError(
            f"{name}: can't be used as {_ARTICLES[kind]}; give a path, a data: URI, a URL, the bytes of a file or"
            f' {{"bytes": …, "path": …}}, and check the template in prompt.{kind}s'
        )
    return (decode_audio if kind == "audio" else decode_video)(data, name, media)


def _image(source: Source, media: MediaTable) -> Image.Image:
    name, page = shown(source), None
    if isinstance(source, Image.Image):
        return fit(source, name, media)
    if isinstance(source, Mapping) and not isinstance(source.get("bytes"), bytes):
        source = source.get("path", source)
    if isinstance(source, str) and source[:5].lower() != "data:":
        source, page = page_of(source)
    data = _data_of(source, name, media)
    if data is None:
        raise MediaError(
            f"{name}: an image is a path, a data: URI, a URL, the bytes of a file,"
            ' {"bytes": …, "path": …} or a PIL image; check the template in prompt.images'
        )
    if page is not None or data.startswith(b"%PDF-"):
        return page_image(data, page, name, media)
    return decode(data, name, media)


def _data_of(source: Any, name: str, media: MediaTable) -> bytes | None:
    """Return the bytes of the file that ``source`` names; None if it does not name a file."""
    match source:
        case bytes() | bytearray() | memoryview():
            return bytes(source)
        case {"bytes": bytes(data)}:
            return data
        case {"path": str(path)}:
            return _data_of(path, shown(path), media)
        case os.PathLike():
            return _read(os.fspath(source), name, media)
        case str() if source[:5].lower() == "data:":
            return read_data_uri(source, name, media)
        case str() if is_for_fetch(source, media):
            from batchkit.rendering.media.download import fetch

            return fetch(source, name, media)
        case str():
            return _read(source, name, media)
    return None


def _read(source: str, name: str, media: MediaTable) -> bytes:
    """Return the bytes of a file under ``media.root``, which may be a folder or a URL."""
    return (read_remote if is_remote(media.root) else read_file)(source, name, media)


class SharedMedia:
    """A thread-safe cache of images, sound and video by name, so that rows with the same image share one copy.

    The cache needs no size limit, because it holds weak references: an entry disappears with the last request that uses
    it.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._alive: WeakValueDictionary[Hashable, Any] = WeakValueDictionary()
        self._loading: WeakValueDictionary[Hashable, threading.Lock] = WeakValueDictionary()

    def get(self, name: Hashable, load: Callable[[], _Shared]) -> _Shared:
        """Return the media called ``name`` from the cache. If no request holds it, call ``load``.

        If several threads ask for the same name, only one of them loads it. Callers must not modify the result. An
        exception of ``load`` is raised to the caller.
        """
        with self._guard:
            loading = self._loading.setdefault(name, threading.Lock())
        with loading:
            found: _Shared | None = self._alive.get(name)
            if found is None:
                found = self._alive[name] = load()
            return found
