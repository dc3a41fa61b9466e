"""The writing side of a run folder's log: ``results.jsonl`` and ``checkpoint.json``.

The log is the truth; the checkpoint is a cache of what the log says up to ``offset``. A row counts
as settled only once its record is in the log, and the checkpoint moves only after an fsync. So a
kill at any time loses nothing that was written, and a power cut nothing before the checkpoint.
A record's vector survives both before the record is written, which therefore always finds it; a row's
generations (``steps.py``) are written before its record.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from batchkit.errors import StoreError
from batchkit.storage.checkpoint import CHECKPOINT, Checkpoint, Totals, trusted_checkpoint
from batchkit.storage.checksum import Checksum
from batchkit.storage.files import (
    free_name,
    is_same_file,
    open_private,
    write_all,
    write_atomically,
)
from batchkit.storage.ledger import RESULTS, read_lines, record_of
from batchkit.storage.plain_json import encoded
from batchkit.storage.steps import GenerationLine, StepsLog
from batchkit.storage.vectors import VectorPlace, VectorWriter
from batchkit.types import Record, Usage

if TYPE_CHECKING:
    import numpy as np

_BLOCK_BYTES = 1 << 20
_AT_ONCE = 1000
_SHARED_S = 1.0  # an fsync of vectors is for all that came in this time
_SHARED_BYTES = 64 << 20


class RecordLine(NamedTuple):
    """A record as it is in the log, newline included, and its parsed fields: at least ``index``,
    ``status``, ``usage`` and ``error``.

    ``vector`` (float32 or float16): the store writes it, and completes the line with its place.
    """

    raw: bytes
    record: Mapping[str, Any]
    vector: np.ndarray[Any, Any] | None = None


def line_of(record: Record, vector_dtype: str = "float32") -> RecordLine:
    """The log line for ``record``; its vector will be stored as ``vector_dtype``."""
    table = record.to_json()
    if record.vector is None:
        return RecordLine(encoded(table), table)
    import numpy as np

    vector = np.frombuffer(record.vector, "<f4").astype(vector_dtype)
    return RecordLine(encoded(table), table, vector)


class Store:
    """The log of one run folder, open for appending.

    Used by one process at a time (the folder's lock) and by one thread. ``append`` only collects;
    ``flush`` writes all that was collected in one call, and from then on those rows are settled;
    ``sync`` makes them survive a power cut and moves the checkpoint. ``check_lock`` is called
    before each write, and raises LostLockError if the folder's lock was lost: then nothing is
    written. Vectors go to segments with numbers from ``first_segment`` on.

    Every method raises StoreError if a disk operation fails; the log is then cut back to its last
    whole line, and the store stays usable for reading. Opening a log that was damaged before its
    checkpoint raises StoreError, too.
    """

    def __init__(
        self,
        folder: Path,
        *,
        check_lock: Callable[[], None] = lambda: None,
        first_segment: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self.path = folder / RESULTS
        self.salvaged_bytes = 0
        self._check_lock = check_lock
        self._clock = clock
        try:
            known = trusted_checkpoint(folder) or Checkpoint(Totals(), Checksum())
            self.totals, self._checksum = known.totals, known.checksum
            self._file = open_private(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            self._end = self._recover(self._checksum.end)
            self._checksum.extend(self.path, self._end)
        except OSError as error:
            raise StoreError(f"{self.path}: {error.strerror or error}") from error
        self.steps = StepsLog(folder, self.totals, known.steps)
        self._pending: list[RecordLine] = []
        self._generations: list[GenerationLine] = []
        self._vectors = VectorWriter(folder, first_segment)
        self._vector_bytes = 0
        self._next_vectors = 0.0
        self._synced_end = -1

    def append(self, record: Record) -> None:
        """Collect ``record`` for the next ``flush``."""
        self.copy(line_of(record))

    def copy(self, line: RecordLine) -> None:
        """Collect a line that was made elsewhere, unchanged but for the place of its vector."""
        self._pending.append(line)
        if line.vector is not None:
            self._vector_bytes += line.vector.nbytes

    def copy_generation(self, line: GenerationLine) -> None:
        """Collect a generation of a row with several; it is written before the records."""
        self._generations.append(line)

    def copy_all(self, lines: Iterable[RecordLine | GenerationLine]) -> None:
        """Write lines that were made elsewhere; only a thousand, or 64 MiB of vectors, are in memory
        at a time."""
        for number, line in enumerate(lines, start=1):
            if isinstance(line, RecordLine):
                self.copy(line)
            else:
                self.copy_generation(line)
            if number % _AT_ONCE == 0:
                self.flush_if_due()
        self.flush()

    def flush_if_due(self) -> None:
        """``flush``, unless vectors are among what was appended and the last ones were written less
        than a second ago: each time costs an fsync."""
        if not self._vector_bytes or (
            self._vector_bytes >= _SHARED_BYTES or self._clock() >= self._next_vectors
        ):
            self.flush()

    def flush(self) -> None:
        """Write what was appended; after this the rows count as settled."""
        if not (self._pending or self._generations):
            return
        self._check_lock()
        if self._generations:
            self.steps.write(self._generations)
            self._generations = []
        block = b"".join(self._lines())
        try:
            write_all(self._file, block)
            self._end += len(block)
            self._checksum.add(block)
            pending, self._pending, self._vector_bytes = self._pending, [], 0
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
            self.totals.add(line.record)
            self.steps.settle(line.record["index"])

    def _lines(self) -> Iterator[bytes]:
        """The collected lines, whose vectors have survived a power cut by then.

        They are all in one order, so that the newest record of a row stays the last.
        """
        with_vector = [line for line in self._pending if line.vector is not None]
        vectors = [line.vector for line in with_vector if line.vector is not None]
        places = self._vectors.write([line.record["index"] for line in with_vector], vectors)
        if places:
            self._next_vectors = self._clock() + _SHARED_S
        coming = iter(places)
        for line in self._pending:
            yield line.raw if line.vector is None else _with_place(line.raw, next(coming))

    def sync(self) -> float:
        """Flush, fsync, then move the checkpoint. Returns the seconds that it took."""
        self._check_lock()
        self._check_files()
        self.flush()
        started = time.monotonic()
        if self._synced_end == self._end and self.steps.is_synced:
            return 0.0
        try:
            self.steps.sync()  # before the records that follow from it
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
            self.steps.close()
            self._vectors.close()

    def checkpoint(self) -> None:
        """Replace the checkpoint with one for the whole log; ``sync`` is the safe way."""
        Checkpoint(self.totals, self._checksum, self.steps.point).write(self.folder)

    @property
    def usage(self) -> Usage:
        """The tokens of all that is in the folder. A generation that a row got again, after a failure
        or a restart, counts once, though each record of the row has it."""
        totals = self.totals
        if self.steps.count:
            return self.steps.usage
        return Usage(totals.prompt_tokens, totals.completion_tokens)

    def _check_files(self) -> None:
        """Check that the logs are still there, before a checkpoint refers to them.

        Raises:
            StoreError: one was removed, replaced or cut.
        """
        if not is_same_file(self.path, self._file, self._end):
            path = self.path
        elif not self.steps.is_there:
            path = self.steps.path
        else:
            return
        raise StoreError(
            f"{path}: was removed, replaced or cut while this run worked, so lines of it are gone. Put it"
            f" back, if there is a copy; `batchkit verify --repair {self.folder}` keeps what is left,"
            " and the next start runs the rows without a record"
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
        write_atomically(free_name(self.path, ".torn-"), _blocks(self.path, broken_at, end))
        self.salvaged_bytes = end - broken_at
        if is_tail:
            os.ftruncate(self._file, broken_at)
            return broken_at
        # In one step, so that a kill loses no record behind the broken line.
        write_atomically(self.path, _whole_lines(self.path, broken_at))
        os.close(self._file)
        self._file = open_private(self.path, os.O_RDWR | os.O_APPEND)
        return os.fstat(self._file).st_size


def _with_place(raw: bytes, place: VectorPlace) -> bytes:
    return b'%b,"embedding":%b}\n' % (raw.removesuffix(b"}\n"), orjson.dumps(place._asdict()))


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
