"""Fingerprints of input files, which show whether the input has changed since the run began."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from batchkit.config.masking import masked
from batchkit.config.regular_file import open_regular
from batchkit.config.tables import InputTable
from batchkit.errors import InputError
from batchkit.sources.files import is_empty, remote_error
from batchkit.sources.finding import input_files
from batchkit.sources.formats import ROWS_ARE_FILES, format_of, load_format, read_as
from batchkit.storage.manifest import FileFingerprint


def fingerprint(
    table: InputTable, previous: Sequence[FileFingerprint] = ()
) -> list[FileFingerprint]:
    """Return one fingerprint per input file, in order.

    ``previous``: fingerprints of an earlier start. If a local file has the path, size and times of one of them, the
    file is not read, and the old sha256 is used.

    Raises:
        InputError: no file matches, or one is empty or can't be read.
    """
    known = {(old.path, old.size, old.mtime_ns, old.ctime_ns): old.sha256 for old in previous}
    found = (
        _remote(path)
        if "://" in path
        else _local(path, known, is_row=format_of(path, table) in ROWS_ARE_FILES)
        for path in input_files(table)
    )
    columns = {(old.path, old.sha256): old.columns for old in previous}
    return [
        replace(
            file,
            read_as=read_as(file.path, table),
            columns=columns.get((file.path, file.sha256)) or _columns(file.path, table),
        )
        for file in found
    ]


def _columns(path: str, table: InputTable) -> tuple[str, ...]:
    """Return the columns of a local table; an empty tuple if it can't be read. Reading its rows reports the error
    later."""
    if "://" in path:  # to know its format, the remote file would be opened
        return ()
    format_ = load_format(format_of(path, table))
    if not format_.is_table:
        return ()
    with suppress(InputError):
        for found in format_.read(path, table, lambda _: False, 0):
            return tuple(map(str, found)) if isinstance(found, dict) else ()
    return ()


def content_hash(path: str) -> str:
    """Return the hash of a file's content, which equals ``sha256`` in the file's fingerprint.

    Raises:
        InputError: the file can't be read.
    """
    return (_remote(path) if "://" in path else _local(path, {}, is_row=True)).sha256


def changed_files(
    table: InputTable, then: Sequence[FileFingerprint], *, thorough: bool
) -> dict[str, str]:
    """Return how each changed file of the input differs from its earlier fingerprint in ``then``, by path.

    Without ``thorough``, only the size and modification time of local files are compared. With it, the content is also
    compared if a file's ctime differs, remote files are compared, and new files that match are found.

    Raises:
        InputError: a remote file can't be examined.
    """
    found = {old.path: how for old in then if (how := _change(old)) is not None}
    if thorough and not found:
        known = {old.path: old for old in then}
        now = ((file, known.get(file.path)) for file in fingerprint(table, then))
        found = {new.path: how for new, old in now if (how := _difference(old, new)) is not None}
    return found


def _change(old: FileFingerprint) -> str | None:
    if "://" in old.path:
        return None
    try:
        stat = Path(old.path).stat()
    except OSError as error:
        return (error.strerror or str(error)).lower()
    now = FileFingerprint(old.path, stat.st_size, stat.st_mtime_ns, old.sha256)
    return _difference(old, now)


def _difference(old: FileFingerprint | None, new: FileFingerprint) -> str | None:
    if old is None:
        return "it was not there"
    if new.size != old.size:
        return f"{old.size:,} bytes → {new.size:,} bytes"
    if new.sha256 != old.sha256:
        return "its content differs, its size is the same"
    if new.mtime_ns != old.mtime_ns:
        return "it was written to, its size is the same"
    return None


def _local(
    path: str, known: Mapping[tuple[str, int, int, int], str], *, is_row: bool
) -> FileFingerprint:
    """Return the fingerprint of a local file. ``is_row``: True if the file is a row itself; only such a file may be
    empty.

    ``known``: known hashes by path, size and times; these files are not read.
    """
    try:
        with open_regular(path) as file:
            stat = os.fstat(file.fileno())  # before the content: a write meanwhile shows later
            sha256 = known.get((path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
            if sha256 is None:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{path}: can't be read: {error.strerror}") from error
    if not stat.st_size and not is_row:
        raise is_empty(path)
    return FileFingerprint(path, stat.st_size, stat.st_mtime_ns, sha256, stat.st_ctime_ns)


def _remote(path: str) -> FileFingerprint:
    from fsspec.archive import AbstractArchiveFileSystem
    from fsspec.core import url_to_fs

    try:
        filesystem, name = url_to_fs(path)
        # http identifies a file by its URL: the same URL with a new signature is the same file.
        known_by = masked(name) if "http" in filesystem.protocol else name
        filesystem.invalidate_cache()  # cached listings may be out of date
        size, key = filesystem.size(name), str(filesystem.ukey(known_by))
        # The ukey of an archive names an open file.
        if isinstance(filesystem, AbstractArchiveFileSystem):
            key = _content(filesystem, name)
        if "http" in filesystem.protocol:  # the ukey of http is only the URL
            info = filesystem.info(name)
            version = info.get("ETag") or info.get("Last-Modified")
            key += f" {size} {version or _content(filesystem, name)}"
    except Exception as error:  # each filesystem raises its vendor's own types
        raise remote_error(path, error) from error
    return FileFingerprint(path, size or 0, 0, hashlib.sha256(key.encode()).hexdigest())


def _content(filesystem: Any, name: str) -> str:
    """Return a hash of a remote file's content, for stores that provide neither an ETag nor a modification time."""
    with filesystem.open(name, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
