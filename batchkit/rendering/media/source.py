"""Reading of the file that a row names: below ``media.root`` (a folder or an fsspec URL), or in a ``data:`` URI."""

from __future__ import annotations

import base64
import io
import os
import re
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from PIL import Image

from batchkit.config.regular_file import open_regular
from batchkit.config.tables import MediaTable
from batchkit.config.urls import bare, failure, is_remote
from batchkit.errors import JobError, MediaError
from batchkit.sources import reader

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
# ".." between separators. Each may be percent-encoded, even several times, because a store may decode the path.
_SEPARATOR = r"(?:/|\\|%(?:25)*(?:2f|5c))"
_UPWARD = re.compile(rf"(?:^|{_SEPARATOR})(?:\.|%(?:25)*2e){{2}}(?:{_SEPARATOR}|$)", re.IGNORECASE)
_PAGE = re.compile(  # RFC 8118; a URL may have a query
    r"(.*\.pdf(?:\?[^#]*)?)#page=([1-9][0-9]{0,8})", re.IGNORECASE | re.DOTALL
)


class PageOf(NamedTuple):
    """The path or URL of a file, and the number, from 1, of a page in it. ``page`` is None if no page is named."""

    file: str
    page: int | None


def page_of(source: str) -> PageOf:
    """Split ``scans/a.pdf#page=3`` into the path ``scans/a.pdf`` and the page number 3."""
    match = _PAGE.fullmatch(source)
    return PageOf(source, None) if match is None else PageOf(match[1], int(match[2]))


def is_for_fetch(source: str, media: MediaTable) -> bool:
    """Return whether ``source`` is a URL to download, not a file below ``media.root``.

    If ``media.root`` is a folder, every URL except ``file://`` is downloaded.
    """
    scheme = _SCHEME.match(source)
    if scheme is None or scheme[0].lower() == "file://":
        return False
    return scheme[0].lower() in ("http://", "https://") or not is_remote(media.root)


def read_file(source: str, name: str, media: MediaTable) -> bytes:
    """Return the content of the file at ``source``, a path or ``file://`` URL, which must be below ``media.root``.
    ``name``: the file's name in messages.

    Raises:
        MediaError: the file is missing, outside the root, not a regular file, or over ``media.max_bytes``.
    """
    path = _file_path(source, name)
    try:
        root = Path(media.root).resolve()
        resolved = (root / path).resolve()
        if not resolved.is_relative_to(root):
            raise _outside(name, resolved, root)
        with io.BufferedReader(open_regular(resolved)) as file:
            # Check again, because a folder in the path may have been replaced with a link to the outside meanwhile.
            found = Path(f"/proc/self/fd/{file.fileno()}").readlink()
            if not found.is_relative_to(root):
                raise _outside(name, found, root)
            size = os.fstat(file.fileno()).st_size
            check_bytes(size, name, media)
            data = file.read(min(size, media.max_bytes) + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MediaError(
            f"{name}: no such file under media.root {root}; check the path, or set media.root"
        ) from error
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: links form a loop
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise MediaError(
            f"{name}: can't be read: {reason}; give the path of a file that you may read"
            " (if this is base64 text, put data:image/png;base64, in front of it)"
        ) from error
    check_bytes(len(data), name, media)
    return data


def _outside(name: str, found: Path, root: Path) -> MediaError:
    return MediaError(
        f"{name}: the file is {found}, outside media.root {root};"
        " move it below the root, or set media.root to a folder above both"
    )


def read_data_uri(uri: str, name: str, media: MediaTable) -> bytes:
    """Return the bytes of a base64 ``data:`` URI; its media type is ignored.

    Raises:
        MediaError: the URI is not base64, or its bytes are over ``media.max_bytes``.
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
    """Raise MediaError for a file over ``media.max_bytes``."""
    if n_bytes > media.max_bytes:
        raise MediaError(
            f"{name}: has {n_bytes} bytes or more, but media.max_bytes is {media.max_bytes};"
            " raise it or store the file smaller"
        )


def shown(source: object, kind: str = "image") -> str:
    """Return a text that names ``source`` in messages: short, on one line, without secrets in a URL."""
    match source:
        case Image.Image():
            return f"PIL image ({source.width}×{source.height}, {source.mode})"
        case bytes() | bytearray() | memoryview():
            return f"{kind} of {memoryview(source).nbytes} bytes"
        case {"path": str() | os.PathLike() as path}:
            return shown(path)
        case {"bytes": bytes(data)}:
            return f"{kind} of {len(data)} bytes"
        case os.PathLike():
            return line(os.fspath(source))
        case str() if source[:5].lower() == "data:":
            return f"{line(source[:40])}… ({len(source)} characters)"
        case str():
            return line(bare(source) if "://" in source else source) or "empty path"
    return f"{kind} {reader.shown(source)} ({type(source).__name__})"


def line(text: str) -> str:
    """Return ``text`` in a form for messages: on one line, printable, and cut if it is long."""
    found = text if text.isprintable() else repr(text)
    return found if len(found) <= 200 else f"{found[:120]}… ({len(found)} characters)"


def check_named(source: str, name: str) -> None:
    """Raise MediaError if ``source`` is empty, which happens if a template that should name a file renders to no
    text."""
    if not source:
        raise MediaError(
            f"{name}: the template in prompt.images, videos, audios or texts gave no text; check the row's field"
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
        if parts.netloc not in ("", "localhost"):
            raise MediaError(f"{name}: the file URL names another host; write file:///folder/x.png")
        raise MediaError(
            f"{name}: the file URL contains a ? or #; write %3F or %23 instead, or give the path itself"
        )
    return unquote(parts.path)


def check_root(media: MediaTable) -> None:
    """Raise JobError if ``media.root`` is a URL that can't be opened; a folder is not checked."""
    if not is_remote(media.root):
        return
    try:
        _filesystem_of(media.root)
    except Exception as error:  # each filesystem raises its vendor's own types
        raise JobError(f"media.root: {_unopened(media.root, error)}") from error


def read_remote(source: str, name: str, media: MediaTable) -> bytes:
    """Return the content of the file at ``source``: a path below ``media.root``, or a URL that begins with
    ``media.root``.

    Raises:
        MediaError: the file is missing, outside the root, a folder, or over ``media.max_bytes``; or the store has any
            other error.
    """
    below, root = _below(source, name, media.root), shown(media.root)
    try:
        filesystem, folder = _filesystem_of(media.root)
    except Exception as error:  # each filesystem raises its vendor's own types
        raise MediaError(f"{name}: {_unopened(media.root, error)}") from error
    path = f"{folder.rstrip('/')}/{below}" if folder else below
    try:
        # Some filesystems have their own syntax. For git and GitHub, only the text after a ":" or "@" is the path, so a
        # name with these characters could lead outside the folder.
        if folder and not filesystem._strip_protocol(path).startswith(folder.rstrip("/") + "/"):
            raise _outside_url(name, root)
        found = filesystem.info(path)
        if found.get("type") == "directory":
            raise MediaError(f"{name}: is a folder; give the path of a file")
        size = found.get("size")
        check_bytes(size or 0, name, media)
        # cat_file instead of open(), because memory:// shares one open file among threads. An empty object has no bytes
        # to request.
        end = media.max_bytes + 1
        data: bytes = b"" if size == 0 else filesystem.cat_file(path, start=0, end=end)
    except MediaError:
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MediaError(
            f"{name}: no such file under media.root {root}; check the path, or set media.root"
        ) from error
    except Exception as error:
        reason = line(f"{type(error).__name__}: {failure(error, media.root)}")
        raise MediaError(
            f"{name}: can't be read from media.root {root}: {reason}; check the store, and that you may"
            " read there"
        ) from error
    check_bytes(len(data), name, media)
    return data


def _filesystem_of(url: str) -> tuple[Any, str]:
    """Return the fsspec filesystem of ``url``, and the URL's folder in the syntax of that filesystem.

    Every thread and process opens its own filesystem, because not all filesystems are thread-safe.
    """
    return _opened_filesystem(url, threading.get_ident(), os.getpid())


@lru_cache(maxsize=256)  # cached, because opening a zip archive reads its list of members
def _opened_filesystem(url: str, thread: int, process: int) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    found: tuple[Any, str] = url_to_fs(url)
    return found


def _below(source: str, name: str, root: str) -> str:
    """Return the path of ``source`` relative to ``root``. Raises MediaError if the path leads outside of ``root``."""
    check_named(source, name)
    folder = root if root.endswith("/") else root + "/"
    if source.startswith(folder):
        path = source.removeprefix(folder)
    elif _SCHEME.match(source) or source.startswith("/"):
        raise _outside_url(name, shown(root))
    else:
        path = source
    if _UPWARD.search(path):
        raise MediaError(
            f"{name}: contains a .., which could lead outside media.root {shown(root)};"
            " give the path below it"
        )
    return "/".join(part for part in path.split("/") if part != ".")


def _outside_url(name: str, root: str) -> MediaError:
    return MediaError(
        f"{name}: is outside media.root {root}; give the path below it, or set media.root to a"
        " URL above both"
    )


def _unopened(root: str, error: Exception) -> str:
    return f"{shown(root)} can't be opened: {line(failure(error, root))}"
