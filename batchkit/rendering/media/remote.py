"""From what a row names to the bytes of a file below a ``media.root`` that is an fsspec URL."""

from __future__ import annotations

import os
import re
import threading
from typing import Any, NamedTuple

from batchkit.config.tables import MediaTable
from batchkit.config.urls import failure, is_remote
from batchkit.errors import JobError, MediaError
from batchkit.rendering.media.source import check_bytes, check_named, has_scheme, line, shown

# ".." between separators, percent-encoded to any depth, since a store or its server may decode it.
_SEPARATOR = r"(?:/|\\|%(?:25)*(?:2f|5c))"
_UPWARD = re.compile(rf"(?:^|{_SEPARATOR})(?:\.|%(?:25)*2e){{2}}(?:{_SEPARATOR}|$)", re.IGNORECASE)

_of_thread = threading.local()


class _Root(NamedTuple):
    """``path`` is in the filesystem's own form, without its protocol."""

    filesystem: Any
    path: str


def check_root(media: MediaTable) -> None:
    """Raises JobError if ``media.root`` is a URL that can't be opened; a folder is not checked."""
    if not is_remote(media.root):
        return
    try:
        _opened(media.root)
    except Exception as error:  # each filesystem raises its vendor's own types
        raise JobError(f"media.root: {_unopened(media.root, error)}") from error


def read_remote(source: str, name: str, media: MediaTable) -> bytes:
    """The file at ``source``, a path below ``media.root``, or a URL that begins with it.

    Raises:
        MediaError: missing, outside the root, a folder, over ``media.max_bytes``, or any error of
            the store.
    """
    below, root = _below(source, name, media.root), shown(media.root)
    try:
        filesystem, folder = _opened(media.root)
    except Exception as error:  # each filesystem raises its vendor's own types
        raise MediaError(f"{name}: {_unopened(media.root, error)}") from error
    path = f"{folder.rstrip('/')}/{below}" if folder else below
    try:
        # Some filesystems have their own syntax: for git and GitHub, the path is what follows a
        # ":" or "@", whatever comes before it.
        if folder and not filesystem._strip_protocol(path).startswith(folder.rstrip("/") + "/"):
            raise _outside(name, root)
        found = filesystem.info(path)
        if found.get("type") == "directory":
            raise MediaError(f"{name}: is a folder there; give the path of a file")
        size = found.get("size")
        check_bytes(size or 0, name, media)
        # Not open(): memory:// gives all threads one file. An empty object has no range to request.
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


def _opened(url: str) -> _Root:
    """The filesystem behind ``url``, created on first use in this process.

    Render threads read concurrently. An asynchronous filesystem (S3, GCS, Azure) works on fsspec's
    own loop, and fsspec gives all threads the same instance. The others do not promise thread
    safety, so each thread has its own.
    """
    made_for = (os.getpid(), url)
    if getattr(_of_thread, "made_for", None) != made_for:
        from fsspec.core import url_to_fs

        _of_thread.root, _of_thread.made_for = _Root(*url_to_fs(url)), made_for
    root: _Root = _of_thread.root
    return root


def _below(source: str, name: str, root: str) -> str:
    """The path of ``source`` below ``root``, checked for parts that lead out of it."""
    check_named(source, name)
    folder = root if root.endswith("/") else root + "/"
    if source.startswith(folder):
        path = source.removeprefix(folder)
    elif has_scheme(source) or source.startswith("/"):
        raise _outside(name, shown(root))
    else:
        path = source
    if _UPWARD.search(path):
        raise MediaError(
            f"{name}: contains a .., which could lead outside media.root {shown(root)};"
            " give the path below it"
        )
    return "/".join(part for part in path.split("/") if part != ".")


def _outside(name: str, root: str) -> MediaError:
    return MediaError(
        f"{name}: lies outside media.root {root}; give the path below it, or set media.root to a"
        " URL that holds both"
    )


def _unopened(root: str, error: Exception) -> str:
    return f"{shown(root)} can't be opened: {line(failure(error, root))}"
