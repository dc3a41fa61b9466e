"""From what a row names to the bytes of a file, without leaving the media root."""

from __future__ import annotations

import base64
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from PIL import Image

from batchkit.config.tables import MediaTable
from batchkit.config.urls import bare, is_remote
from batchkit.errors import MediaError

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def has_scheme(source: str) -> bool:
    return _SCHEME.match(source) is not None


def is_for_fetch(source: str, media: MediaTable) -> bool:
    """Whether it is a URL to download: with a folder as root, any URL but ``file://``."""
    scheme = _SCHEME.match(source)
    if scheme is None or scheme[0].lower() == "file://":
        return False
    return scheme[0].lower() in ("http://", "https://") or not is_remote(media.root)


def read_file(source: str, name: str, media: MediaTable) -> bytes:
    """The file at ``source``, a path or ``file://`` URL, which must be under ``media.root``.

    Raises:
        MediaError: missing, outside the root, not a regular file, over ``media.max_bytes``.
    """
    path = _file_path(source, name)
    try:
        root = Path(media.root).resolve()
        resolved = (root / path).resolve()
        if not resolved.is_relative_to(root):
            raise _outside(name, resolved, root)
        with _opened(resolved) as file:
            # The path may have been replaced since the check, a folder by a link to the outside.
            found = _through(file).readlink()
            if not found.is_relative_to(root):
                raise _outside(name, found, root)
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise MediaError(
                    f"{name}: {resolved} is {_file_type(status.st_mode)}; give the path of a file"
                )
            check_bytes(status.st_size, name, media)
            with open(_through(file), "rb") as readable:
                data = readable.read(min(status.st_size, media.max_bytes) + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MediaError(
            f"{name}: no such file under media.root {root}; check the path, or set media.root"
        ) from error
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: links form a loop
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise MediaError(
            f"{name}: can't be read: {reason}; give the path of a file that you may read"
            " (base64 text begins with data:image/png;base64,)"
        ) from error
    check_bytes(len(data), name, media)
    return data


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A descriptor that can't read: opening a device or a FIFO then has no side effects."""
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _through(descriptor: int) -> Path:
    """A link that shows where the file is now, and opens exactly this file."""
    return Path(f"/proc/self/fd/{descriptor}")


def _outside(name: str, found: Path, root: Path) -> MediaError:
    return MediaError(
        f"{name}: the file is {found}, outside media.root {root};"
        " move it there, or set media.root to a folder that holds both"
    )


def read_data_uri(uri: str, name: str, media: MediaTable) -> bytes:
    """The bytes of a base64 ``data:`` URI; its media type is ignored.

    Raises:
        MediaError: not base64, or over ``media.max_bytes``.
    """
    head, comma, payload = uri.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise MediaError(
            f"{name}: found a data: URI that is not base64;"
            " write data:image/png;base64, and then the file's bytes in base64"
        )
    check_bytes(len(payload) // 4 * 3 - payload.count("=", -2), name, media)
    try:
        text = unquote_to_bytes(payload) if "%" in payload else payload
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise MediaError(
            f"{name}: the base64 is broken ({error}); encode the whole file, without line breaks"
        ) from error


def check_bytes(n_bytes: int, name: str, media: MediaTable) -> None:
    """Raises MediaError for a file over ``media.max_bytes``."""
    if n_bytes > media.max_bytes:
        raise MediaError(
            f"{name}: has {n_bytes} bytes or more, media.max_bytes is {media.max_bytes};"
            " raise it or store the image smaller"
        )


def shown(source: object) -> str:
    """The name of ``source`` in messages: short, on one line, without secrets in a URL."""
    match source:
        case Image.Image():
            return f"PIL image ({source.width}×{source.height}, {source.mode})"
        case bytes() | bytearray() | memoryview():
            return f"image of {memoryview(source).nbytes} bytes"
        case {"bytes": bytes(data), "path": str(path)}:
            return f"{line(path)} of {len(data)} bytes"
        case {"bytes": bytes(data)}:
            return f"image of {len(data)} bytes"
        case Mapping():
            return f"image with the keys {line(', '.join(map(str, source)))}"
        case os.PathLike():
            return line(os.fspath(source))
        case str() if source[:5].lower() == "data:":
            return f"{line(source[:40])}… ({len(source)} characters)"
        case str() if "://" in source:
            return line(bare(source))
        case str():
            return line(source) or "empty path"
    try:
        text = repr(source)
    except Exception:  # the object's own code runs here
        text = "that can't be shown"
    return f"image {line(text)} ({type(source).__name__})"


def line(text: object) -> str:
    """``text`` on one printable line, cut if it is long."""
    found = text if isinstance(text, str) else repr(text)
    if not found.isprintable():
        found = repr(found)
    return found if len(found) <= 200 else f"{found[:120]}… ({len(found)} characters)"


def check_named(source: str, name: str) -> None:
    """Raises MediaError for a source without any text."""
    if not source:
        raise MediaError(
            f"{name}: the template in prompt.images or prompt.texts gave no text; check the row's field"
        )


def _file_path(source: str, name: str) -> str:
    check_named(source, name)
    if source[:5].lower() != "file:":
        return source
    try:
        parts = urlsplit(source)
    except ValueError as error:
        raise MediaError(f"{name}: not a file URL ({error}); write file:///folder/x.png") from error
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise MediaError(
            f"{name}: names another host, or contains a ? or #;"
            " write file:///folder/x.png with %3F and %23, or give the path itself"
        )
    return unquote(parts.path)


def _file_type(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a folder"
    return "a FIFO" if stat.S_ISFIFO(mode) else "a device or socket"
