"""The writing side of a run folder: its logs, its vectors, and their checkpoint.

The logs are the truth; the checkpoint is a cache. A row counts as settled only once its record is in
``results.jsonl``, and the checkpoint moves only after an fsync. So a kill at any time loses no written line,
and a power cut loses no line before the checkpoint. A record's vector and its row's generations are on disk
(fsync) before the record is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from batchkit.errors import LostVectorError
from batchkit.storage import lines
from batchkit.storage.checkpoint import CHECKPOINT, Checkpoint, read_checkpoint
from batchkit.storage.files import disk_errors
from batchkit.storage.lines import Spent, record_in, tokens_in
from batchkit.storage.log import RESULTS, STEPS, Log, LogLine
from batchkit.storage.plain_json import encoded
from batchkit.storage.runfolder import Claim
from batchkit.storage.steps import GenerationLine, StepsLog
from batchkit.storage.vectors import Vectors, VectorWriter
from batchkit.types import Counted, Record, Usage, VectorPlace

if TYPE_CHECKING:
    import numpy as np

_AT_ONCE = 1000  # lines in memory
_SHARED_S = 1.0  # records with vectors or generations wait up to this long, to share one fsync
_SHARED_BYTES = 64 << 20


class RecordLine(NamedTuple):
    """A record's line for the log, newline included, and the fields of it that are counted.

    The ledger writes ``vector`` (float32 or float16) to a segment, and adds its position to the line.
    """

    raw: bytes
    record: Counted
    vector: np.ndarray[Any, Any] | None = None


def line_of(
    record: Record,
    vector: bytes | None = None,
    vector_dtype: str = "float32",
    tokens: int | None = None,
) -> RecordLine:
    """Return the log line for ``record`` with ``vector`` (float32, little endian).

    The vector will be stored as ``vector_dtype``; with ``tokens``, as a matrix of one vector per token.
    """
    if vector is None:
        return RecordLine(lines.encoded(record), record)
    import numpy as np

    found = np.frombuffer(vector, "<f4").astype(vector_dtype)
    found = found if tokens is None else found.reshape(tokens, -1)
    return RecordLine(lines.encoded(record), record, found)


def raw_line(raw: bytes, vector: np.ndarray[Any, Any] | None = None) -> RecordLine:
    """Return a RecordLine for ``raw``, a record's line that was read from a log."""
    record = record_in(raw)
    assert record is not None
    return RecordLine(raw, record, vector)


def rewritten(record: Mapping[str, Any], vector: np.ndarray[Any, Any] | None = None) -> RecordLine:
    """Return a RecordLine for ``record``, which was read from a log and then changed."""
    return raw_line(encoded(record), vector)


class Ledger:
    """The writer of a run's ``results.jsonl``, ``steps.jsonl``, vectors and checkpoint.

    Used by one thread of the process that holds ``lock``, the folder's lock. Records with vectors or generations wait
    up to 1 s so that several share one fsync; other lines are written at once. Written lines survive a kill. ``flush``
    writes the waiting records; ``sync`` makes all lines survive a power cut and moves the checkpoint.

    - ``totals``: counts of records. ``steps``: the generations.
    - ``messages``: texts about data that was set aside when the logs were opened.
    - ``lost``: per row, how many generations a record after the checkpoint counts that ``steps.jsonl`` lacks, unless
      the record says so itself.

    Vectors go to segments with numbers from ``first_segment`` on.

    Raises (every method):
        StoreError: a disk operation failed, and the logs end with a whole line; or, when opened, a log was damaged
            before its checkpoint.
        LostLockError: the folder's lock was lost; nothing was written.
        LostVectorError: when opened, the vector of a record was missing.
    """

    def __init__(
        self,
        folder: Path,
        lock: Claim | None = None,
        *,
        first_segment: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self._lock, self._clock = lock, clock
        known = read_checkpoint(folder) or Checkpoint.none()
        self.totals = known.totals
        checksum, self._stored = known.checksum, Vectors(folder)
        # By row: generations that records after the checkpoint count, and those known to be lost.
        self._uncovered = dict[int, Spent]()
        self._known_lost = dict[int, int]()
        self._records = Log(folder / RESULTS, record_in, checksum, self._take, start=checksum.end)
        self.steps = StepsLog(folder, self.totals, known.steps, self._uncovered)
        self._vectors = VectorWriter(folder, first_segment, known.vectors)
        self._waiting: list[RecordLine] = []
        self._waiting_bytes = 0
        self._next_flush = 0.0
        self._at_checkpoint: tuple[int, int] | None = None
        self._records.append(b"")  # creates the file, which every run has from its beginning

    @property
    def messages(self) -> list[str]:
        logs = [log for log in (self._records, self.steps.log) if log.salvaged_bytes]
        found = [
            f"{log.path.name} ended with {log.salvaged_bytes} broken bytes, which were moved to a .torn file"
            for log in logs
        ]
        if lost := self.lost:
            found.append(
                f"{STEPS} has lost {sum(lost.values()):,} generations that the records of {len(lost):,} rows"
                f" count, for example of row {min(lost)}. The rows' answers are whole, and their tokens still count"
            )
        return found

    @property
    def lost(self) -> dict[int, int]:
        lost, known = self.steps.lost, self._known_lost
        return {row: n for row, n in lost.items() if n > known.get(row, 0)}

    @property
    def usage(self) -> Usage:
        """Total tokens used by this run, across all starts.

        A generation that several records of its row contain, after a failure or a restart, counts once.
        """
        of = self.steps.spent if self.steps.spent.generations else self.totals
        return Usage(of.prompt_tokens, of.completion_tokens)

    def write(self, lines: Iterable[RecordLine | GenerationLine]) -> None:
        """Write ``lines`` in their order, generations first. At most 1,000 are in memory at a time."""
        generations = list[GenerationLine]()
        for line in lines:
            if isinstance(line, GenerationLine):
                generations.append(line)
            else:
                self._waiting.append(line)
                self._waiting_bytes += 0 if line.vector is None else line.vector.nbytes
            if len(self._waiting) + len(generations) >= _AT_ONCE:
                generations = self._write_some(generations)
        self._write_some(generations)

    def flush(self) -> None:
        """Write the waiting records. After this their rows count as settled."""
        if not self._waiting:
            return
        self._check_lock()
        if any(map(_needs_other_file, self._waiting)):
            self.steps.log.sync()
            self._next_flush = self._clock() + _SHARED_S
        self._records.append(b"".join(self._lines()))
        written, self._waiting, self._waiting_bytes = self._waiting, [], 0
        for line in written:
            self.totals.add(line.record)
            self.steps.settle(line.record.index)

    def sync(self) -> float:
        """Flush, fsync, then move the checkpoint. Return the seconds that this took."""
        self._check_lock()
        for log in (self._records, self.steps.log):
            log.check()
        self._vectors.check()
        self.flush()
        started = time.monotonic()
        ends = self._records.end, self.steps.log.end
        if self._at_checkpoint == ends:
            return 0.0
        self.steps.log.sync()  # before the records that rely on its generations
        self._records.sync()
        advice = f"; every finished row is in {RESULTS}. Make room, then run the same command again"
        with disk_errors(self.folder / CHECKPOINT, advice=advice):
            self.checkpoint()
        self._at_checkpoint = ends
        return time.monotonic() - started

    def checkpoint(self) -> None:
        """Write a checkpoint for the whole logs. It relies on an fsync of them; ``sync`` does both."""
        Checkpoint(self.totals, self._records.checksum, self.steps.point, self._vectors.ends).write(
            self.folder
        )

    def close(self) -> None:
        """Sync and close; the files are closed even if the sync fails or the lock was lost."""
        try:
            self.sync()
        finally:
            self._records.close()
            self.steps.log.close()
            self._vectors.close()

    def _take(self, line: LogLine[Record]) -> None:
        """Count a record after the checkpoint. Raises LostVectorError if its vector is missing."""
        record = line.record
        assert record is not None
        if record.generations and not self.totals.is_settled(record.index):
            self._uncovered[record.index] = Spent(record.generations, 0, *tokens_in(record))
            self._known_lost[record.index] = record.generations_lost or 0
        self.totals.add(record)
        place = record.embedding
        if place is not None and (fault := self._stored.fault_at(record.index, place)):
            raise LostVectorError(fault)

    def _check_lock(self) -> None:
        if self._lock is not None:
            self._lock.check()

    def _write_some(self, generations: list[GenerationLine]) -> list[GenerationLine]:
        """Write ``generations``, and records unless they wait for a shared fsync; return a new empty list."""
        if generations:
            self._check_lock()
            self.steps.write(generations)
        if not any(map(_needs_other_file, self._waiting)) or (
            self._waiting_bytes >= _SHARED_BYTES or self._clock() >= self._next_flush
        ):
            self.flush()
        return []

    def _lines(self) -> Iterator[bytes]:
        """Yield the waiting records' lines, after an fsync of their vectors.

        They keep their order, so that the newest record of a row stays the last.
        """
        with_vector = [line for line in self._waiting if line.vector is not None]
        vectors = [line.vector for line in with_vector if line.vector is not None]
        places = iter(self._vectors.write([line.record.index for line in with_vector], vectors))
        for line in self._waiting:
            yield line.raw if line.vector is None else _with_place(line.raw, next(places))


def _needs_other_file(line: RecordLine) -> bool:
    """Return whether the record needs data in another file: a vector or generations."""
    return line.vector is not None or line.record.generations is not None


def _with_place(raw: bytes, place: VectorPlace) -> bytes:
    return b'%b,"embedding":%b}\n' % (raw.removesuffix(b"}\n"), msgspec.json.encode(place))
