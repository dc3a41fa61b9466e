"""The append-only logs of a run, ``results.jsonl`` and ``steps.jsonl``: writing, recovering, reading.

A line is valid if ``lines.py`` decodes a record or a generation from it. A start, ``verify`` and all readers use this
test. A kill can cut off only the last line, which then has no newline.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Generic, NamedTuple, TypeVar

from batchkit.config.regular_file import open_regular
from batchkit.errors import StoreError
from batchkit.storage.files import (
    disk_errors,
    free_name,
    is_same_file,
    open_private,
    write_all,
    write_atomically,
)
from batchkit.storage.lines import LINE_HEAD, Generation, generation_in, record_in
from batchkit.types import Record

RESULTS = "results.jsonl"
STEPS = "steps.jsonl"
REQUEUE = ".requeue"  # a folder next to the log with the files that replace it after a requeue or a repair
_BLOCK_BYTES = 1 << 20
_IF_FULL = "; every line before is on disk. Make room, then run the same command again"


Parsed = TypeVar("Parsed", bound=Record | Generation)


class LogLine(NamedTuple, Generic[Parsed]):
    """One line of a log; ``record`` is None if the bytes are not a record or a generation.

    ``offset`` and ``end`` are byte positions; ``end`` is after the newline. If the newline is missing, ``end`` is the
    end of the file, and ``record`` is None: a kill has cut off this line.
    """

    offset: int
    end: int
    raw: bytes
    record: Parsed | None


def read_lines(path: Path, offset: int = 0) -> Iterator[LogLine[Record]]:
    """Yield the lines of a ``results.jsonl`` from byte ``offset`` on, in file order; a missing file has no lines."""
    return _lines(path, offset, record_in)


def read_generations(folder: Path, offset: int = 0) -> Iterator[LogLine[Generation]]:
    """Yield the lines of ``steps.jsonl`` in ``folder`` from byte ``offset`` on, in file order. A missing file has no
    lines."""
    return _lines(folder / STEPS, offset, generation_in)


def _lines(
    path: Path, offset: int, parse: Callable[[bytes], Parsed | None]
) -> Iterator[LogLine[Parsed]]:
    with opened_log(path) as file:
        file.seek(offset)
        for raw in file:
            end = offset + len(raw)
            yield LogLine(offset, end, raw, parse(raw))
            offset = end


def opened_log(path: Path) -> BinaryIO:
    """Open the file ``path`` for reading. If it is missing, return an empty file.

    Raises:
        StoreError: the file can't be read.
    """
    with disk_errors(path, "can't be read"):
        try:
            return BufferedReader(open_regular(path))
        except FileNotFoundError:
            return BytesIO()


def with_pieces(
    lines: Iterable[LogLine[Parsed]], parse: Callable[[bytes], Parsed | None]
) -> Iterator[LogLine[Parsed]]:
    """Yield ``lines``. After a damaged line, also yield the valid lines inside it, since a newline may be damaged.

    The beginning of a valid line is recognized by its first bytes, which never occur inside a JSON string, because
    quotes are escaped there.
    """
    for line in lines:
        yield line
        for piece in line.raw.split(LINE_HEAD)[1:] if line.record is None else ():
            raw = LINE_HEAD + piece.strip() + b"\n"
            if (found := parse(raw)) is not None:
                yield LogLine(line.offset, line.end, raw, found)


def log_of(folder: Path) -> Path:
    """Return the path of ``results.jsonl`` in ``folder``.

    Raises:
        StoreError: the log is missing, or a requeue or a repair is replacing it.
    """
    path = folder / RESULTS
    if os.path.lexists(folder / REQUEUE):
        raise StoreError(
            f"{folder}: a requeue or a repair was interrupted while it replaced {RESULTS};"
            " to finish it, run the job again, or `batchkit verify --repair`"
        )
    if not os.path.lexists(path):
        raise StoreError(_missing(path))
    opened_log(path).close()
    return path


class Checksum(NamedTuple):
    """The CRC-32 of a log's bytes before ``end``.

    A checksum can be continued with further bytes, at 2 GiB/s. CRC-32 detects every burst of up to 32 wrong bits; it
    misses one in 2^32 of all other changes.
    """

    crc32: int = 0
    end: int = 0

    def and_of(self, block: bytes) -> Checksum:
        """Return the checksum of these bytes followed by ``block``."""
        return Checksum(zlib.crc32(block, self.crc32), self.end + len(block))

    def extended(self, path: Path, end: int) -> Checksum:
        """Return the checksum of the bytes of ``path`` before ``end``; only the bytes after this checksum's ``end`` are
        read."""
        found = self
        for block in _blocks(path, self.end, end):
            found = found.and_of(block)
        return found


class Log(Generic[Parsed]):
    """One log, open for appending by one thread of the process that holds the folder.

    Opening checks the file against ``checksum`` (from the last checkpoint). Each later line is parsed by ``parse`` and
    passed to ``take``. Broken bytes after the last valid line are moved to ``<name>.torn-<n>``. A missing file is
    created by the first ``append``.

    - ``start``: byte offset of the first line that ``take`` gets.
    - ``salvaged_bytes`` (attribute): number of broken bytes that were moved.

    Raises:
        StoreError: the log differs from the checkpoint, or is damaged after it, or the disk fails.
    """

    def __init__(
        self,
        path: Path,
        parse: Callable[[bytes], Parsed | None],
        checksum: Checksum,
        take: Callable[[LogLine[Parsed]], None],
        *,
        start: int,
    ) -> None:
        self.path, self.checksum, self._parse = path, checksum, parse
        self.salvaged_bytes = 0
        self._file: int | None = None
        self._synced_end = -1
        try:
            if os.path.lexists(path):
                self._file = open_private(path, os.O_RDWR | os.O_APPEND)
            if (damage := difference(path, checksum, parse)) is not None:
                raise StoreError(damage)
            self._recover(start, take)
        except OSError as error:
            raise StoreError(
                f"{path}: can't be opened: {error.strerror or error}; make it readable and writable, then run the same"
                " command again"
            ) from error

    @property
    def end(self) -> int:
        return self.checksum.end

    @property
    def synced_end(self) -> int:
        """The log's bytes before this survive a power cut. Any thread may read it."""
        return max(self._synced_end, 0)

    def append(self, block: bytes) -> None:
        """Write ``block``, which consists of whole lines, in one call. The lines then survive a kill.

        Raises:
            StoreError: the disk fails; the log is unchanged.
        """
        with disk_errors(self.path, advice=_IF_FULL):
            if self._file is None:
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND
                self._file = open_private(self.path, flags)
            try:
                write_all(self._file, block)
            except BaseException:  # also a KeyboardInterrupt: the lines may be written again
                with suppress(OSError):
                    os.ftruncate(self._file, self.end)
                raise
        self.checksum = self.checksum.and_of(block)

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes from ``start`` to ``end``. Any thread may call this."""
        assert self._file is not None
        return os.pread(self._file, end - start, start)

    def check(self) -> None:
        """Check that the file is still in place.

        Raises:
            StoreError: the file was removed, replaced or cut.
        """
        if self._file is not None and not is_same_file(self.path, self._file, self.end):
            if self.path.name == RESULTS and not self.path.exists():
                raise StoreError(_missing(self.path, "was removed while this run worked"))
            raise StoreError(
                f"{self.path}: was removed, replaced or cut while this run worked, so some lines are lost."
                f" Restore a copy if there is one; otherwise `batchkit verify --repair {self.path.parent}` keeps"
                " the remaining lines, and the next start runs the rows without a record"
            )

    def sync(self) -> None:
        """Make everything written so far survive a power cut.

        Raises:
            StoreError: the disk fails.
        """
        if self._file is not None and self._synced_end != self.end:
            with disk_errors(self.path, advice=_IF_FULL):
                os.fsync(self._file)
            self._synced_end = self.end

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _recover(self, start: int, take: Callable[[LogLine[Parsed]], None]) -> None:
        """Pass the valid lines from byte ``start`` on to ``take``. Move a cut-off end to a separate file."""
        if self._file is None:
            return
        lines = _lines(self.path, start, self._parse)
        for line in lines:
            if line.record is None:
                if any(behind.record is not None for behind in lines):
                    raise StoreError(_damaged(line, self.path))
                size = os.fstat(self._file).st_size
                torn = _blocks(self.path, line.offset, size)
                write_atomically(free_name(self.path, ".torn-"), torn)
                os.ftruncate(self._file, line.offset)
                self.salvaged_bytes = size - line.offset
                break
            take(line)
            start = line.end
        self.checksum = self.checksum.extended(self.path, start)


def difference(path: Path, checksum: Checksum, parse: Callable[[bytes], Any]) -> str | None:
    """Return a message if the log's bytes before ``checksum.end`` have changed, with the remedy; otherwise None.

    Raises:
        OSError: the log can't be read.
    """
    if checksum.end == 0:
        return None
    if path.name == RESULTS and not path.exists():
        return _missing(path)
    size = path.stat().st_size if path.exists() else 0
    if Checksum().extended(path, min(size, checksum.end)) == checksum:
        return None
    for line in _lines(path, 0, parse):
        if line.offset >= checksum.end:
            break
        if line.record is None:
            return _damaged(line, path)
    repair = f"`batchkit verify --repair {path.parent}`"
    if size < checksum.end:
        return (
            f"{path}: has {size} bytes, but had {checksum.end} at the last checkpoint; restore a copy"
            f" of it, or keep the remaining lines with {repair}"
        )
    return (
        f"{path}: was changed since the last checkpoint, before byte {checksum.end}, but each line there is"
        " a whole record, so the change can't be located. Restore a copy, or accept the file as it is now"
        f" with {repair}"
    )


def damage_of(path: Path, checksum: Checksum) -> str | None:
    """Return a message if the log is damaged, before or after the checkpoint; otherwise None.

    A cut-off last line is not damage: it is being written, or a kill has cut it off.
    """
    parse = record_in if path.name == RESULTS else generation_in
    if (found := difference(path, checksum, parse)) is not None:
        return found
    for line in _lines(path, checksum.end, parse):
        if line.record is None and line.raw.endswith(b"\n"):
            return _damaged(line, path)
    return None


def _damaged(line: LogLine[Any], path: Path) -> str:
    return (
        f"{path}: the record at byte {line.offset} is damaged; `batchkit verify --repair {path.parent}` sets"
        " the damage aside and keeps every whole record"
    )


def _missing(path: Path, what: str = "is missing") -> str:
    return (
        f"{path}: {what}; restore a copy if there is one. Otherwise run the job from the beginning: `batchkit"
        " run JOB --fresh`, which keeps the rest of this folder"
    )


def _blocks(path: Path, start: int, end: int) -> Iterator[bytes]:
    """Yield the file's bytes in blocks, because a log may be larger than memory."""
    if start >= end:
        return
    with opened_log(path) as file:
        file.seek(start)
        while block := file.read(min(end - file.tell(), _BLOCK_BYTES)):
            yield block
