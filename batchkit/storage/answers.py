"""Answers of a run by request hash: an index of its log on disk, and a set of hashes in memory."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import tempfile
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import orjson

from batchkit.config.regular_file import open_regular
from batchkit.errors import StoreError
from batchkit.storage.files import disk_errors, open_private
from batchkit.storage.lines import failure_kind
from batchkit.storage.log import opened_log

INDEX = "answers.index"
# Magic, slots, used slots, end of the indexed part, its checksum.
_HEADER = struct.Struct("<8sQQQQ")
_MAGIC = b"answers1"
_FIRST_SLOT = 64
_SLOT = struct.Struct("<8sQ")  # the beginning of a hash, and the offset of its line plus 1
_SLOTS_AT_ONCE = 4
_LEAST_SLOTS = 2**12
_HASH_BYTES = 16
# Quicker than parsing; a line that only looks like an answer does no harm in ``SeenHashes``.
_IS_OK = b'"status":"ok"'
REQUEST_HASH = re.compile(rb'"request_hash":"([0-9a-f]{16})')
INPUT_HASH = re.compile(rb'"input_hash":"([0-9a-f]{16})"')
_LINE_BYTES = 2**14  # read first; most lines are shorter
_BLOCK_BYTES = 2**22
_CHECKED_BYTES = 256  # before the end of the indexed part


class AnswerIndex:
    """An index of the answers in ``log``, a ``results.jsonl`` or ``steps.jsonl``, by request hash.

    It is a hash table in the file ``answers.index`` beside the log, with 16 bytes for each slot. It is built once, and
    continued when the log has grown. Memory does not grow with the log. If another process holds the file, or the
    folder can't be written, the index is built in a temporary file. The file is a cache and may be deleted.

    Raises:
        StoreError: the log can't be read, or the disk is full.
    """

    def __init__(self, log: Path) -> None:
        self._path = log
        try:
            self._log = open_regular(log)
        except OSError as error:
            raise StoreError(f"{log}: can't be read: {error.strerror or error}") from error
        self._file = _table_beside(log)
        magic, *header = _HEADER.unpack(os.pread(self._file, _HEADER.size, 0).ljust(_HEADER.size))
        self._n_slots, self._n_used, self._end, checksum = header
        is_whole = os.fstat(self._file).st_size == _FIRST_SLOT + self._n_slots * _SLOT.size
        if magic != _MAGIC or not is_whole or checksum != self._checksum():
            self._n_slots, self._n_used, self._end = 0, 0, 0
        self.update()

    def find(self, request_hash: str) -> dict[str, Any] | None:
        """Return the line of an answer to a request with this hash, or None if the indexed part has no such line."""
        key = bytes.fromhex(request_hash)[:8]
        for offset in self._offsets(key):
            line: dict[str, Any] = orjson.loads(self._line(offset))
            if line.get("request_hash") == request_hash:
                return line
        return None

    def update(self) -> bool:
        """Add the lines that were written to the log since the last update. Return False if the log has no new
        lines."""
        if self._n_slots and os.fstat(self._log.fileno()).st_size == self._end:
            return False
        with disk_errors(self._path, f"can't write {INDEX}"):
            self._add_lines()
        return True

    def _add_lines(self) -> None:
        # If this process dies, the table is made again: it has entries that the header does not count.
        os.pwrite(self._file, bytes(_HEADER.size), 0)
        if not self._n_slots:
            self._clear(_LEAST_SLOTS)
        self._log.seek(self._end)
        with os.fdopen(os.dup(self._log.fileno()), "rb") as lines:
            for raw in lines:
                if not raw.endswith(b"\n"):
                    break
                if 2 * self._n_used > self._n_slots:
                    self._clear(4 * self._n_slots)
                    lines.seek(0)
                    continue
                if (request_hash := _answered(raw)) is not None:
                    self._add(bytes.fromhex(request_hash)[:8], self._end)
                self._end += len(raw)
        header = self._n_slots, self._n_used, self._end, self._checksum()
        os.pwrite(self._file, _HEADER.pack(_MAGIC, *header), 0)

    def close(self) -> None:
        self._log.close()
        os.close(self._file)

    def _offsets(self, key: bytes) -> Iterator[int]:
        """Yield the offsets of lines whose hash begins with ``key``."""
        for _, found, place in self._probed(key):
            if not place:
                return
            if found == key:
                yield place - 1

    def _add(self, key: bytes, offset: int) -> None:
        """Add a line, unless a line with the same key is there: copies of an answer need no entry."""
        for slot, found, place in self._probed(key):
            if not place:
                os.pwrite(self._file, _SLOT.pack(key, offset + 1), _FIRST_SLOT + slot * _SLOT.size)
                self._n_used += 1
                return
            if found == key:
                return

    def _probed(self, key: bytes) -> Iterator[tuple[int, bytes, int]]:
        """Yield the slots in which ``key`` may be: their number, key, and place (0 for an empty slot)."""
        slot = int.from_bytes(key) % self._n_slots
        while True:
            n_slots = min(_SLOTS_AT_ONCE, self._n_slots - slot)
            block = os.pread(self._file, n_slots * _SLOT.size, _FIRST_SLOT + slot * _SLOT.size)
            for number, (found, place) in enumerate(_SLOT.iter_unpack(block), slot):
                yield number, found, place
            slot = (slot + n_slots) % self._n_slots

    def _line(self, offset: int) -> bytes:
        size = _LINE_BYTES
        while True:
            raw = os.pread(self._log.fileno(), size, offset)
            if (end := raw.find(b"\n")) >= 0:
                return raw[:end]
            if len(raw) < size:
                raise StoreError(f"{self._path}: was cut while it was read")
            size *= 4

    def _clear(self, n_slots: int) -> None:
        os.ftruncate(self._file, 0)
        os.ftruncate(self._file, _FIRST_SLOT + n_slots * _SLOT.size)
        self._n_slots, self._n_used, self._end = n_slots, 0, 0

    def _checksum(self) -> int:
        """Return a checksum of the end of the indexed part, which differs if the log was replaced."""
        start = max(0, self._end - _CHECKED_BYTES)
        return zlib.crc32(os.pread(self._log.fileno(), self._end - start, start))


def _table_beside(log: Path) -> int:
    """Return the open file for the table: beside the log if this process can lock it, otherwise a temporary file."""
    try:
        file = open_private(log.with_name(INDEX), os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            raise
        return file
    except OSError:
        with tempfile.TemporaryFile() as temporary:
            return os.dup(temporary.fileno())


class SeenHashes:
    """A set of hashes, told apart by their first 16 hex digits, at 8 to 32 bytes for each. It says of one hash in about
    10⁹ that it was added although it was not."""

    def __init__(self) -> None:
        self._tables = [_empty_table(2**16)]
        self._n_newest = 0  # hashes in the newest table

    def __contains__(self, found: str) -> bool:
        return self._place(found)[0]

    def add(self, found: str) -> bool:
        """Add a hash. Return True if it was added before."""
        was_there, mark, slot = self._place(found)
        if not was_there:
            newest = self._tables[-1]
            newest[slot] = mark
            self._n_newest += 1
            if 2 * self._n_newest > len(newest):
                self._tables.append(_empty_table(4 * len(newest)))
                self._n_newest = 0
        return was_there

    def _place(self, found: str) -> tuple[bool, int, int]:
        """Return whether a hash was added, its mark, and its slot in the newest table."""
        number = int(found[:16], 16)
        mark, place = number & 0xFFFFFFFF or 1, number >> 32
        slot = 0
        for table in self._tables:
            most = len(table) - 1
            slot = place & most
            while there := table[slot]:
                if there == mark:
                    return True, mark, slot
                slot = (slot + 1) & most
        return False, mark, slot

    def add_answers_of(self, log: Path, kind: re.Pattern[bytes] = REQUEST_HASH) -> None:
        """Add the hashes of all answers in a log; a missing log has none. ``kind``: which hash of a line."""
        hashes = bytearray()
        with opened_log(log) as lines:
            while block := lines.readlines(_BLOCK_BYTES):
                found = [kind.search(raw) for raw in block if _IS_OK in raw]
                digits = b"".join([match[1] for match in found if match is not None])
                hashes += bytes.fromhex(digits.decode())
        self._tables.insert(0, _table_of(hashes))


def _table_of(numbers: bytearray) -> array[int]:
    """Return a table with the first 8 bytes of hashes, one after another."""
    import numpy as np

    found = np.frombuffer(numbers, ">u8")
    marks = np.maximum(found & 0xFFFFFFFF, 1).astype(np.uint32)
    n_slots = 1 << (2 * len(marks)).bit_length()
    slots, table = (found >> 32) & (n_slots - 1), np.zeros(n_slots, np.uint32)
    while len(marks):
        is_empty = table[slots] == 0
        table[slots[is_empty]] = marks[is_empty]  # of several marks for one slot, one is stored
        is_left = table[slots] != marks
        marks, slots = marks[is_left], (slots[is_left] + 1) & (n_slots - 1)
    return array("I", table.tobytes())


class _Answer(msgspec.Struct):
    """The keys of a line that show whether it has an answer, which may have no text."""

    status: str
    text: str | None = None
    request_hash: str | None = None


_answers = msgspec.json.Decoder(_Answer)


def _answered(raw: bytes) -> str | None:
    """Return the request hash of a line, or None if the line has no answer."""
    try:
        line = _answers.decode(raw)
    except msgspec.MsgspecError:  # a damaged line
        return None
    if line.status != "ok" or len(line.request_hash or "") != 2 * _HASH_BYTES:
        return None
    has_text = bool(line.text and line.text.strip())
    return line.request_hash if has_text or failure_kind(orjson.loads(raw)) is None else None


def _empty_table(n_slots: int) -> array[int]:
    return array("I", bytes(4 * n_slots))
