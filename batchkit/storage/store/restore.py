"""Copies of a run's files from a store into a local folder."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from batchkit.errors import StoreError
from batchkit.storage.files import disk_errors, open_private, replacing, write_all
from batchkit.storage.log import RESULTS, STEPS, Checksum
from batchkit.storage.starts import STARTS
from batchkit.storage.store.seals import Chain, Piece, content_of, pieces_after
from batchkit.storage.vectors import VECTORS

_TRUTH = (RESULTS, STEPS, STARTS)


def is_truth(file: str) -> bool:
    """Return whether ``file`` (a path in a run folder) decides which rows are done. The others can be replaced."""
    return file in _TRUTH or file.startswith(f"{VECTORS}/")


def relation(folder: Path, chain: Chain) -> Literal["ahead", "behind", "other"]:
    """Return whether the local ``folder`` has everything that the store has, or a beginning of it, or something else.

    Raises:
        StoreError: a local file can't be read.
    """
    files = {file: pieces for file, pieces in chain.files.items() if is_truth(file)}
    if all(
        local_checksum(folder / file, chain.checksum(file).end) == chain.checksum(file)
        for file in files
    ):
        return "ahead"
    if all(
        pieces_after(pieces, local_checksum(folder / file)) is not None
        for file, pieces in files.items()
    ):
        return "behind"
    return "other"


def local_checksum(path: Path, end: int | None = None) -> Checksum:
    """Return the checksum of a local file, or of its bytes before ``end``; an empty one if there is no file.

    Raises:
        StoreError: the file can't be read.
    """
    with disk_errors(path, "can't be read"):
        size = path.stat().st_size if path.is_file() else 0
        return Checksum().extended(path, size if end is None else min(size, end))


def fetch(chain: Chain, folder: Path, is_wanted: Callable[[str], bool] = lambda file: True) -> int:
    """Copy files of the run into ``folder``. A file that is there already is only extended. Return the bytes copied.

    Raises:
        StoreError: the store can't be reached, a segment is damaged, or the disk fails.
    """
    copied = 0
    # Last the files that make the folder a run, so that a cut-off copy is none.
    for file in sorted(chain.files, key=lambda file: (not is_truth(file), file)):
        if not is_wanted(file):
            continue
        path, pieces = folder / file, chain.files[file]
        if (left := pieces_after(pieces, local_checksum(path))) is None:
            left = pieces
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if left == pieces:
                with replacing(path) as new:
                    copied += _append(chain, new, pieces)
            else:
                copied += _append(chain, path, left)
    return copied


def _append(chain: Chain, path: Path, pieces: list[Piece]) -> int:
    """Append ``pieces`` to a file. Return their size."""
    copied, file = 0, open_private(path, os.O_WRONLY | os.O_APPEND)
    crc32 = local_checksum(path).crc32
    try:
        for piece, content in zip(pieces, content_of(chain.objects, pieces), strict=True):
            crc32 = zlib.crc32(content, crc32)
            if crc32 != piece.part.crc32 or len(content) != piece.part.size:
                raise StoreError(
                    f"{chain.objects.address}/{piece.segment}: damaged: the bytes of {piece.part.file} differ from their"
                    " checksum. Restore a copy of the object"
                )
            write_all(file, content)
            copied += len(content)
        os.fsync(file)
    finally:
        os.close(file)
    return copied
