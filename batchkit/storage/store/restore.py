"""Copies of a run's files from a store into a local folder."""

from __future__ import annotations

import os
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from batchkit.errors import StoreError
from batchkit.storage.files import disk_errors, open_private, write_all
from batchkit.storage.log import RESULTS, STEPS, Checksum
from batchkit.storage.starts import STARTS
from batchkit.storage.store.objects import Objects
from batchkit.storage.store.seals import Chain, Piece, contents_of, pieces_after
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


def fetch(chain: Chain, folder: Path) -> int:
    """Copy the files of the run into ``folder``. A file that is there already is only extended. Return the bytes copied.

    Raises:
        StoreError: the store can't be reached, a segment is damaged, or the disk fails.
    """
    pieces = list[Piece]()
    with ExitStack() as held:
        files = dict[str, _Growing]()
        for file, its in chain.files.items():
            files[file] = growing = _Growing(folder / file, its)
            held.callback(growing.close)
            pieces += growing.left
        # The parts of a segment follow each other, in the order in which they were added.
        pieces.sort(key=lambda piece: (piece.seal, piece.start))
        for piece, content in contents_of(chain.objects, pieces):
            files[piece.part.file].add(chain.objects, piece, content)
        # Last the files that make the folder a run, so that a cut-off copy is none.
        for file in sorted(files, key=lambda file: not is_truth(file)):
            files[file].finish()
    return sum(piece.part.size for piece in pieces)


class _Growing:
    """A local copy of a file. It is extended, or, if it is not a beginning of the file, replaced at the end.

    ``left``: the pieces that it needs.
    """

    def __init__(self, path: Path, pieces: list[Piece]) -> None:
        self._path, local = path, local_checksum(path)
        left = pieces_after(pieces, local)
        self.left, self._crc32 = (pieces, 0) if left is None else (left, local.crc32)
        is_new = self.left is pieces
        self._new = path.with_name(f".{path.name}.restored.tmp") if is_new else path
        flags = os.O_WRONLY | os.O_APPEND | (os.O_CREAT | os.O_TRUNC if is_new else 0)
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_private(self._new, flags)

    def add(self, objects: Objects, piece: Piece, content: bytes) -> None:
        self._crc32 = zlib.crc32(content, self._crc32)
        if self._crc32 != piece.part.crc32 or len(content) != piece.part.size:
            raise StoreError(
                f"{objects.address}/{piece.segment}: damaged: the bytes of {piece.part.file} differ from their checksum."
                " Restore a copy of the object"
            )
        with disk_errors(self._path):
            write_all(self._file, content)

    def finish(self) -> None:
        with disk_errors(self._path):
            os.fsync(self._file)
            self._new.replace(self._path)

    def close(self) -> None:
        os.close(self._file)
        if self._new != self._path:
            self._new.unlink(missing_ok=True)
