"""The writing side of a run folder's log: ``results.jsonl`` and ``checkpoint.json``.

The log is the truth; the checkpoint is a cache of what the log says up to ``offset``. A row counts
as settled only once its record is in the log, and the checkpoint moves only after an fsync. So a
kill at any time loses nothing that was written, and a power cut nothing before the checkpoint.

The checkpoint carries a checksum of the log up to ``offset``, so opening the log detects damage
before that position. A checkpoint that is missing or damaged itself is ignored.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from batchkit.config.regular_file import open_regular
from batchkit.errors import StoreError
from batchkit.storage.checksum import Checksum, Span
from batchkit.storage.files import open_private, write_atomically
from batchkit.storage.index_set import IndexSet
from batchkit.storage.ledger import IS_MISSING, RESULTS, log_of, read_lines, record_of
from batchkit.storage.plain_json import encoded
from batchkit.types import Record

CHECKPOINT = "checkpoint.json"
VERSION = 1
COUNTS = ("records", "prompt_tokens", "completion_tokens")
_SEAL = b',"seal":'
_BLOCK_BYTES = 1 << 20


class RecordLine(NamedTuple):
    """A record as it is in the log, newline included, and its parsed fields: at least ``index``,
    ``status``, ``usage`` and ``error``."""

    raw: bytes
    record: dict[str, Any]


def line_of(record: Record) -> RecordLine:
    """The log line for ``record``."""
    told = record.to_json()
    return RecordLine(encoded(told), told)


@dataclass
class Totals:
    """Counts over the log, updated with every line."""

    completed: IndexSet = field(default_factory=IndexSet)
    failed_by_kind: dict[str, IndexSet] = field(default_factory=dict)
    records: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def ok(self) -> int:
        return len(self.completed)

    @property
    def failed(self) -> int:
        return sum(map(len, self.failed_by_kind.values()))

    @property
    def failed_rows(self) -> IndexSet:
        rows = IndexSet()
        for kind_rows in self.failed_by_kind.values():
            rows = rows | kind_rows
        return rows

    def count_by_kind(self) -> dict[str, int]:
        return {kind: len(rows) for kind, rows in self.failed_by_kind.items() if len(rows)}

    def is_settled(self, index: int) -> bool:
        """True if the row has a record, ok or failed."""
        return index in self.completed or any(
            index in rows for rows in self.failed_by_kind.values()
        )

    def add(self, record: Mapping[str, Any]) -> None:
        """Count one line; the newest record of a row decides whether it is ok or failed."""
        index = record["index"]
        self.records += 1
        if usage := record.get("usage"):
            self.prompt_tokens += usage["prompt_tokens"]
            self.completion_tokens += usage["completion_tokens"]
        for rows in self.failed_by_kind.values():
            rows.discard(index)
        if record["status"] == "ok":
            self.completed.add(index)
        else:
            self.completed.discard(index)
            kind = (record.get("error") or {}).get("kind", "unknown")
            self.failed_by_kind.setdefault(kind, IndexSet()).add(index)


class Store:
    """The log of one run folder, open for appending.

    Used by one process at a time (the folder's lock) and by one thread. ``append`` only collects;
    ``flush`` writes all that was collected in one call, and from then on those rows are settled;
    ``sync`` makes them survive a power cut and moves the checkpoint. ``check_lock`` is called
    before each write, and raises LostLockError if the folder's lock was lost: then nothing is
    written.

    Every method raises StoreError if a disk operation fails; the log is then cut back to its last
    whole line, and the store stays usable for reading. Opening a log that was damaged before its
    checkpoint raises StoreError, too.
    """

    def __init__(self, folder: Path, *, check_lock: Callable[[], None] = lambda: None) -> None:
        self.folder = folder
        self.path = folder / RESULTS
        self.salvaged_bytes = 0
        self._check_lock = check_lock
        try:
            self.totals, self._checksum = trusted_checkpoint(folder) or (Totals(), Checksum())
            self._file = open_private(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            self._end = self._recover(self._checksum.end)
            self._checksum.extend(self.path, self._end)
        except OSError as error:
            raise StoreError(f"{self.path}: {error.strerror or error}") from error
        self._lines: list[bytes] = []
        self._pending: list[dict[str, Any]] = []
        self._synced_end = -1

    def append(self, record: Record) -> None:
        """Collect ``record`` for the next ``flush``."""
        self.copy(line_of(record))

    def copy(self, line: RecordLine) -> None:
        """Collect a line that was made elsewhere, unchanged."""
        self._lines.append(line.raw)
        self._pending.append(line.record)

    def flush(self) -> None:
        """Write what was appended; after this the rows count as settled."""
        if not self._lines:
            return
        block = b"".join(self._lines)
        self._check_lock()
        try:
            written = os.write(self._file, block)
            while written < len(block):
                written += os.write(self._file, block[written:])
            self._end += len(block)
            self._checksum.add(block)
            pending, self._lines, self._pending = self._pending, [], []
        except BaseException as error:
            # Also after a KeyboardInterrupt: the collected lines will be written again.
            with suppress(OSError):
                os.ftruncate(self._file, self._end)
            if not isinstance(error, OSError):
                raise
            raise StoreError(
                f"{self.path}: can't write: {error.strerror}; every row before is on disk."
                " Make room, then run the same command again"
            ) from error
        for line in pending:
            self.totals.add(line)

    def sync(self) -> float:
        """Flush, fsync, then move the checkpoint. Returns the seconds that it took."""
        self._check_lock()
        self._check_file()
        self.flush()
        started = time.monotonic()
        if self._synced_end == self._end:
            return 0.0
        try:
            os.fsync(self._file)
            self.checkpoint()
        except OSError as error:
            raise StoreError(
                f"{self.folder / CHECKPOINT}: can't write: {error.strerror}; every finished row is"
                f" in {RESULTS}. Make room, then run the same command again"
            ) from error
        self._synced_end = self._end
        return time.monotonic() - started

    def close(self) -> None:
        """Sync and close; the file is closed even if the sync fails or the lock was lost."""
        try:
            self.sync()
        finally:
            os.close(self._file)

    def checkpoint(self) -> None:
        """Replace the checkpoint with one for the whole log; ``sync`` is the safe way."""
        totals, checksum = self.totals, self._checksum
        table = {
            "version": VERSION,
            "offset": checksum.end,
            "completed": totals.completed.ranges(),
            "failed": totals.failed_rows.ranges(),
            "failed_by_kind": {
                kind: rows.ranges() for kind, rows in totals.failed_by_kind.items() if len(rows)
            },
            "counts": {
                "records": totals.records,
                "ok": totals.ok,
                "failed": totals.failed,
                "prompt_tokens": totals.prompt_tokens,
                "completion_tokens": totals.completion_tokens,
            },
            "crc32": checksum.segments,
        }
        content = orjson.dumps(table, option=orjson.OPT_SERIALIZE_NUMPY)
        write_atomically(self.folder / CHECKPOINT, _sealed(content))

    def _check_file(self) -> None:
        """Check that the log is still there, before a checkpoint refers to it.

        Raises:
            StoreError: the log was removed, replaced or cut.
        """
        ours = os.fstat(self._file)
        try:
            there = self.path.lstat()
        except OSError:
            there = None
        is_there = there is not None and os.path.samestat(ours, there)
        if not is_there or ours.st_size != self._end:
            raise StoreError(
                f"{self.path}: was removed, replaced or cut while this run worked, so records are"
                " gone. Put it back, if there is a copy; `batchkit verify --repair"
                f" {self.folder}` keeps what is left, and the next start runs the other rows"
            )

    def _recover(self, offset: int) -> int:
        """Count the lines past ``offset``; if a line is broken, cut the rest off.

        What is cut is kept as ``results.jsonl.torn-<n>``; whole records behind a broken line are
        written again, so that no finished row is lost. Returns the end of the log.
        """
        end, broken_at, is_tail = offset, None, True
        for line in read_lines(self.path, offset):
            end = line.end
            if line.record is not None:
                self.totals.add(line.record)
                is_tail = broken_at is None
            elif broken_at is None:
                broken_at = line.offset
        if broken_at is None:
            return end
        write_atomically(free_name(self.path, "torn"), _blocks(self.path, broken_at, end))
        self.salvaged_bytes = end - broken_at
        if is_tail:
            os.ftruncate(self._file, broken_at)
            return broken_at
        # In one step, so that a kill loses no record behind the broken line.
        write_atomically(self.path, _whole_lines(self.path, broken_at))
        os.close(self._file)
        self._file = open_private(self.path, os.O_RDWR | os.O_APPEND)
        return os.fstat(self._file).st_size


class Checkpoint(NamedTuple):
    """What the log says up to ``checksum.end``."""

    totals: Totals
    checksum: Checksum

    @property
    def is_older(self) -> bool:
        """True if an older version wrote it, without a checksum: correct, but not relied on."""
        return self.checksum.end > 0 and not self.checksum.segments


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """What ``checkpoint.json`` says, correct or not; None if it is missing or unusable."""
    try:
        found = orjson.loads(_read_checkpoint(folder))
        if found["version"] != VERSION:
            return None
        totals = Totals(
            completed=IndexSet.from_ranges(found["completed"]),
            failed_by_kind={
                kind: IndexSet.from_ranges(ranges)
                for kind, ranges in found["failed_by_kind"].items()
            },
            **{name: _count(found["counts"][name]) for name in COUNTS},
        )
        segments = map(_count, found.get("crc32", ()))
        return Checkpoint(totals, Checksum(segments, _count(found["offset"])))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def is_sealed(folder: Path) -> bool:
    """True if ``checkpoint.json`` is byte for byte what a store wrote."""
    try:
        content = _read_checkpoint(folder)
    except OSError:
        return False
    return content == _sealed(content.rpartition(_SEAL)[0] + b"}")


def _read_checkpoint(folder: Path) -> bytes:
    with open_regular(folder / CHECKPOINT) as file:
        return file.readall()


def trusted_checkpoint(folder: Path) -> Checkpoint | None:
    """The checkpoint, after a check of the log against it; None if it is missing or damaged itself.

    Raises:
        StoreError: the log is not what it was at the checkpoint.
    """
    found = read_checkpoint(folder) if is_sealed(folder) else None
    if found is not None and (damage := log_damage(folder, found.checksum)) is not None:
        raise StoreError(damage)
    return found


def check_log(folder: Path) -> None:
    """Check the part of the log that the checkpoint covers. Call it before reading a run's records.

    Raises:
        StoreError: the log is missing or damaged.
    """
    log_of(folder)
    trusted_checkpoint(folder)


def passed_over(folder: Path) -> str | None:
    """A warning if readers skip a line although whole records follow it; it names the first one.

    Reads only the part of the log without a checksum: all of it if there is no sound checkpoint.
    The part before is what ``check_log`` checks.
    """
    path, broken = folder / RESULTS, None
    checkpoint = read_checkpoint(folder) if is_sealed(folder) else None
    start = checkpoint.checksum.end if checkpoint else 0
    for line in read_lines(path, max(start - 1, 0)):
        if line.offset < start < line.end:  # the log was changed before: check_log raises
            return None
        if line.record is None and line.end > start:
            broken = line.offset if broken is None else broken
        elif broken is not None:
            return (
                f"{path}: the line at byte {broken} is no record and is passed over; its row may be"
                f" missing below. `batchkit verify --repair {folder}` sets it aside, and the next run"
                " answers the row again"
            )
    return None


def log_damage(folder: Path, checksum: Checksum) -> str | None:
    """Where and how the log differs from ``checksum``, and the remedy; None if it does not."""
    path = folder / RESULTS
    if not path.exists():
        return f"{path}: {IS_MISSING}"
    repair = f"`batchkit verify --repair {folder}`"
    remedy = f"{repair} sets the damage aside and keeps every whole record"
    size = path.stat().st_size
    span = Span(0, size) if size < checksum.end else checksum.difference(path)
    if span is None:
        return None
    if (broken := _broken_line(path, span)) is not None:
        return f"{path}: the record at byte {broken} is damaged; {remedy}"
    if size < checksum.end:
        return f"{path}: has {size} bytes, and had {checksum.end} at the last checkpoint; {remedy}"
    return (
        f"{path}: was changed since the last checkpoint, between byte {span.start} and {span.end},"
        " and each line there is a whole record, so nothing tells what was changed. Bring a copy"
        f" back, or accept the file as it is now with {repair}"
    )


def _blocks(path: Path, start: int, end: int) -> Iterator[bytes]:
    """The file's bytes from ``start`` to ``end``, in blocks: a log may be larger than memory."""
    with path.open("rb") as file:
        file.seek(start)
        while block := file.read(min(end - file.tell(), _BLOCK_BYTES)):
            yield block


def _whole_lines(path: Path, broken_at: int) -> Iterator[bytes]:
    """The log up to ``broken_at``, and the whole records behind it."""
    yield from _blocks(path, 0, broken_at)
    with path.open("rb") as file:
        file.seek(broken_at)
        yield from (line for line in file if record_of(line) is not None)


def _broken_line(path: Path, span: Span) -> int | None:
    """Byte position of the first line in ``span`` that is not a record."""
    for line in read_lines(path):
        if line.offset >= span.end:
            return None
        if line.record is None and line.end > span.start:
            return line.offset
    return None


def _sealed(content: bytes) -> bytes:
    """The JSON object ``content`` with its own checksum as its last member."""
    return content[:-1] + _SEAL + str(zlib.crc32(content)).encode() + b"}"


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def free_name(path: Path, suffix: str) -> Path:
    """``<path>.<suffix>-<n>`` with the first n that is not taken."""
    number = 1
    while (free := path.with_name(f"{path.name}.{suffix}-{number}")).exists():
        number += 1
    return free
