"""Whether the input is still what the run began with."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass

from batchkit.config import InputTable
from batchkit.errors import InputError
from batchkit.sources.files import input_files, remote_error


@dataclass(frozen=True, slots=True)
class FileFingerprint:
    """One input file. ``sha256`` is of its bytes; of a remote file, of what its store tells of it
    (``fsspec``'s ``ukey``: size, ETag or time), and ``mtime_ns`` is then 0."""

    path: str
    size: int
    mtime_ns: int
    sha256: str


def fingerprint(
    table: InputTable, previous: Iterable[FileFingerprint] = ()
) -> list[FileFingerprint]:
    """One fingerprint per input file, in order.

    A local file whose path, size and time stand in ``previous`` keeps its sha256 unread.

    Raises:
        InputError: no file, or one can't be read.
    """
    known = {(old.path, old.size, old.mtime_ns): old.sha256 for old in previous}
    return [_remote(path) if "://" in path else _local(path, known) for path in input_files(table)]


def _local(path: str, known: dict[tuple[str, int, int], str]) -> FileFingerprint:
    try:
        with open(path, "rb") as file:
            stat = os.fstat(file.fileno())
            sha256 = known.get((path, stat.st_size, stat.st_mtime_ns))
            if sha256 is None:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{path}: can't be read: {error.strerror}") from error
    return FileFingerprint(path, stat.st_size, stat.st_mtime_ns, sha256)


def _remote(path: str) -> FileFingerprint:
    from fsspec.core import url_to_fs

    try:
        filesystem, name = url_to_fs(path)
        size, key = filesystem.size(name), str(filesystem.ukey(name))
    except Exception as error:  # each filesystem raises its vendor's own
        raise remote_error(path, error) from error
    return FileFingerprint(path, size or 0, 0, hashlib.sha256(key.encode()).hexdigest())
