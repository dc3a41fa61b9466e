"""The writing side of a run folder: logs, vectors and the checkpoint.

The checkpoint is a cache of the logs. A row is settled once its record is in ``results.jsonl``. The checkpoint is
written only after an fsync of the logs. Therefore a kill loses no written line, and a power cut loses no line before
the checkpoint. A record's vector and its row's generations are on disk (fsync) before the record is written.
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
from batchkit.storage.vectors import VECTORS, Vectors, VectorWriter
from batchkit.types import Counted, Record, Usage, VectorPlace

if TYPE_CHECKING:
    import numpy as np

_AT_ONCE = 1000  # lines in memory
_SHARED_S = 1.0  # records with vectors or generations wait up to this long, to share one fsync
_SHARED_BYTES = 64 << 20


class RecordLine(NamedTuple):
    """A record's line for the log, newline included, and those fields of the record that the ledger counts.

    ``vector`` (float32 or float16) is written to a segment by the ledger, which adds the vector's position to the line.
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

    - ``vector_dtype``: type in which the vector will be stored.
    - ``tokens``: number of rows if the vector is a matrix with one vector per token.
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

    Lines are written at once and survive a kill. Only records with vectors or generations wait, up to 1 s, so that
    several share one fsync. ``flush`` writes the waiting records. ``sync`` makes all lines survive a power cut and
    writes the checkpoint. Only one thread may use it, in the process that holds ``lock``, the folder's lock.

    ``first_segment``: lowest number for new segments of vectors.

    Attributes:

    - ``totals``: counts of records.
    - ``steps``: the log of generations.
    - ``messages``: lines about data that was set aside when the logs were opened.
    - ``lost``: number of generations by row that are missing from ``steps.jsonl``, although a record after the
      checkpoint counts them. Rows whose record already gives this number as lost are left out.

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
        # By row, for records after the checkpoint: the generations that the record counts, and how many of them it
        # gives as lost.
        self._counted_by_row = dict[int, Spent]()
        self._known_lost = dict[int, int]()
        self._records = Log(folder / RESULTS, record_in, checksum, self._take, start=checksum.end)
        self.steps = StepsLog(folder, self.totals, known.steps, self._counted_by_row)
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
                f" count, for example of row {min(lost)}. The rows' answers are complete, and the tokens of the lost"
                " generations still count"
            )
        return found

    @property
    def lost(self) -> dict[int, int]:
        lost, known = self.steps.lost, self._known_lost
        return {row: n for row, n in lost.items() if n > known.get(row, 0)}

    @property
    def synced_end(self) -> int:
        """The records before this byte of ``results.jsonl`` survive a power cut. Any thread may read it."""
        return self._records.synced_end

    @property
    def usage(self) -> Usage:
        """Total tokens used by this run, across all starts.

        After a failure or a restart, several records of a row may include the same generation. Such a generation counts
        once.
        """
        of = self.steps.spent if self.steps.spent.generations else self.totals
        return Usage(of.prompt_tokens, of.completion_tokens)

    def write(self, lines: Iterable[RecordLine | GenerationLine]) -> None:
        """Write ``lines``: all generations first, then the records, each in the given order.

        Writes after every 1,000 lines, so that a long iterable does not fill the memory.
        """
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
            self.steps.forget(line.record.index)

    def sync(self) -> float:
        """Flush the waiting records, call fsync on the logs, then write the checkpoint. Return the seconds that this
        took."""
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

    @property
    def ends(self) -> dict[str, int]:
        """The size in bytes of each file whose bytes are written for good, by its path in the run folder."""
        vectors = {f"{VECTORS}/{name}": end for name, end in self._vectors.ends.items()}
        return {RESULTS: self._records.end, STEPS: self.steps.log.end, **vectors}

    def checkpoint(self) -> None:
        """Write a checkpoint for the whole logs. The caller must have called fsync on them; ``sync`` does both."""
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
        """Count a record that was written after the checkpoint, while the log is opened. Raises LostVectorError if the
        record's vector is missing."""
        record = line.record
        assert record is not None
        if record.generations and not self.totals.is_settled(record.index):
            self._counted_by_row[record.index] = Spent(record.generations, 0, *tokens_in(record))
            self._known_lost[record.index] = record.generations_lost or 0
        self.totals.add(record)
        place = record.embedding
        if place is not None and (fault := self._stored.fault_at(record.index, place)):
            raise LostVectorError(fault)

    def _check_lock(self) -> None:
        if self._lock is not None:
            self._lock.check()

    def _write_some(self, generations: list[GenerationLine]) -> list[GenerationLine]:
        """Write ``generations`` now, and return a new empty list.

        This also writes the held records. They stay held if one of them has a vector or generations, and its fsync is
        not due yet.
        """
        if generations:
            self._check_lock()
            self.steps.write(generations)
        if not any(map(_needs_other_file, self._waiting)) or (
            self._waiting_bytes >= _SHARED_BYTES or self._clock() >= self._next_flush
        ):
            self.flush()
        return []

    def _lines(self) -> Iterator[bytes]:
        """Write the vectors of the waiting records with an fsync, then yield the records' lines in their order.

        The order matters: of several records of a row, the last one in the log counts.
        """
        with_vector = [line for line in self._waiting if line.vector is not None]
        vectors = [line.vector for line in with_vector if line.vector is not None]
        places = iter(self._vectors.write([line.record.index for line in with_vector], vectors))
        for line in self._waiting:
            yield line.raw if line.vector is None else _with_place(line.raw, next(places))


def _needs_other_file(line: RecordLine) -> bool:
    """Return whether the record refers to another file: to a vector or to generations in ``steps.jsonl``."""
    return line.vector is not None or line.record.generations is not None


def _with_place(raw: bytes, place: VectorPlace) -> bytes:
    return b'%b,"embedding":%b}\n' % (raw.removesuffix(b"}\n"), msgspec.json.encode(place))
