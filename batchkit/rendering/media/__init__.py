"""Images, sound, video and texts: from what a row names to RGB pixels of the right size, samples or text.

``load_media``, ``load_image`` and ``load_text`` are the entry points. ``source`` turns a name into bytes and stays
within the media root, a folder or an fsspec URL; ``download`` does it for web addresses on the listed
hosts. ``pixels`` turns bytes into the image, and ``apart`` those of a PDF, sound or video.
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

_BEGINNING = 8000  # bytes in which git, too, takes a NUL as a sign that a file is no text

_TYPES = {  # what browsers play, by how it begins; audio or video where either may be inside
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
    """A new RGB image, fully decoded, upright by its EXIF, scaled to the limits of ``media``.

    ``source`` is a path below ``media.root`` (absolute, relative to it, ``file://`` or, if the
    root is an fsspec URL, a URL that begins with it), a base64 ``data:`` URI, an http(s) URL on
    ``media.allow_urls``, the bytes of an image file, ``{"bytes": …, "path": …}`` as Hugging Face
    datasets store it, or an image (which is not modified).
    PNG, JPEG, WebP, GIF, BMP and TIFF are read, recognised by their content; of an animation, the
    first frame, and no TIFF of several pages. Of a PDF, the page that ``#page=3`` after its path or URL names, or the only one. Transparency becomes white; gray of more than 8 bits is scaled to 8, not clipped.

    Safe to call from many threads. Memory, without the result, stays within
    ``media.max_decode_bytes``, twice ``media.max_bytes`` and 64 MiB; N threads need N - 1 times
    128 MiB more (images that need more than that take turns), and the files' bytes.

    Raises:
        MediaError: missing, refused, too large, or not an image. The only exception.
    """
    return cast("Image.Image", load_media("image", source, media))


def load_media(kind: str, source: Source, media: MediaTable) -> Media:
    """As ``load_image``, of any ``kind``: "image", "audio" or "video". A clip has no page, and is no PIL image;
    it is read by its content, too."""
    try:
        return _image(source, media) if kind == "image" else _clip(kind, source, media)
    except MediaError as error:
        message = str(error)
    # A new error without its cause: a failed row waits for its record, and the frames of the first
    # error would keep the file's bytes and its pixels in memory until then.
    raise MediaError(message)


def load_text(path: str, media: MediaTable) -> str:
    """The text of the file at ``path``, below ``media.root``; invalid UTF-8 becomes U+FFFD.

    Raises:
        MediaError: missing, outside the root, over ``media.max_bytes``, or not text, as UTF-16 is
            not to a model. The only exception.
    """
    data = _read(path, shown(path), media)
    if data.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        raise MediaError(f"{shown(path)}: is UTF-16 text; save it as UTF-8")
    if b"\0" in data[:_BEGINNING]:
        raise MediaError(f"{shown(path)}: is not text: it has NUL bytes; save it as text, in UTF-8")
    return data.decode("utf-8-sig", errors="replace")


def load_bytes(source: object, media: MediaTable) -> bytes:
    """The bytes of the file at the path ``source``, below ``media.root``.

    Raises:
        MediaError: as ``load_text``; or it is no path, but for example a web address.
    """
    name = shown(source)
    if not isinstance(source, str) or is_for_fetch(source, media):
        raise MediaError(f"{name}: is not the path of a file")
    return _read(page_of(source)[0], name, media)


def load_clip_bytes(source: Source, media: MediaTable) -> bytes:
    """The file of a clip, not decoded.

    Raises:
        MediaError: as ``load_media``, or it names no file.
    """
    name = shown(source, "clip")
    data = _data_of(source, name, media)
    if data is None:
        raise MediaError(f"{name}: names no file")
    return data


def load_for_server(kind: str, source: Source, media: MediaTable) -> Media:
    """As ``load_media``, but a video is not decoded. Its type is "video/mp4" if it is none that browsers play."""
    if kind != "video" or isinstance(source, VideoFile):
        return load_media(kind, source, media)
    data = load_clip_bytes(source, media)
    return VideoFile(data, media_type("video", data) or "video/mp4")


def media_type(kind: str, data: bytes) -> str | None:
    """Of a clip that browsers play; None of others."""
    names = (name for mark, name in _TYPES.items() if mark.match(data[:64]))
    return next((name.format(kind=kind) for name in names), None)


def load_still(source: Source, side: int, media: MediaTable) -> Image.Image:
    """A frame near the middle of a video, no side longer than ``side``. Raises MediaError as ``load_media``."""
    return decode_still(load_clip_bytes(source, media), shown(source, "video"), side, media)


def _clip(kind: str, source: Source, media: MediaTable) -> Clip:
    if isinstance(source, Clip):
        return source
    name = shown(source, kind)
    data = _data_of(source, name, media)
    if data is None:
        raise MediaError(
            f"{name}: {_ARTICLES[kind]} is a path, a data: URI, a URL, the bytes of a file or"
            f' {{"bytes": …, "path": …}}; check the template in prompt.{kind}s'
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
    """The bytes of what ``source`` names; None if it is nothing that names a file."""
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
    """The bytes of a file under ``media.root``, wherever that is."""
    return (read_remote if is_remote(media.root) else read_file)(source, name, media)


class SharedMedia:
    """Images and clips by name, in weak references, so no limit is needed. Many threads may use it."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._alive: WeakValueDictionary[Hashable, Any] = WeakValueDictionary()
        self._loading: WeakValueDictionary[Hashable, threading.Lock] = WeakValueDictionary()

    def get(self, name: Hashable, load: Callable[[], _Shared]) -> _Shared:
        """What has that name; calls ``load`` if no row holds it. One thread at a time loads it.

        Callers must not modify it. Raises what ``load`` raises.
        """
        with self._guard:
            turn = self._loading.setdefault(name, threading.Lock())
        with turn:
            found: _Shared | None = self._alive.get(name)
            if found is None:
                found = self._alive[name] = load()
            return found
