"""The vectors of a run: ``vectors/000000.arrow``, ``vectors/000001.arrow``, …

Each file is a segment: an Arrow IPC stream with the columns ``index`` (int64: the vector's row), ``vector`` (a
fixed-size list of float32 or float16) and ``crc32`` (of the vector's bytes). A record names its vector by
``{"segment", "row", "dimensions"}``. A matrix (``task = "token_embed"``) is stored as ``tokens`` vectors, which begin
at ``row`` and are all in one record batch.

A record is written once its vector is on disk. Each start writes new segments, because a segment of an earlier start
may end in a cut-off batch after a kill. No record refers to vectors in a cut-off batch.
"""

from __future__ import annotations

import mmap
import os
import re
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from batchkit.config.regular_file import open_regular
from batchkit.errors import LostVectorError
from batchkit.storage.files import disk_errors, open_private, sync_folder, write_all
from batchkit.types import Pooled, VectorPlace

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    Vector = np.ndarray[Any, Any]

VECTORS = "vectors"
DTYPES = ("float32", "float16")
_NAME = re.compile(r"(\d{6,})\.arrow", re.ASCII)
_RELEASE_BYTES = 64 << 20
_IF_FULL = "; every row before is on disk. Make room, then run the same command again"
_ADVICE = "Restore a copy of the file if there is one; otherwise the next start runs the rows without a vector again"


class VectorType(NamedTuple):
    """The type of a segment's vectors: ``dtype`` "float32" or "float16", and ``dimensions`` (None if the lengths
    differ)."""

    dtype: str
    dimensions: int | None

    def __str__(self) -> str:
        return f"{self.dtype} of {self.dimensions:,} dimensions"


def segment_path(folder: Path, number: int) -> Path:
    return folder / VECTORS / f"{number:06}.arrow"


def segments_of(folder: Path) -> dict[int, Path]:
    """Return the segments of the run in ``folder`` by number, ascending; other files are ignored."""
    with suppress(FileNotFoundError, NotADirectoryError):
        matches = (_NAME.fullmatch(path.name) for path in (folder / VECTORS).iterdir())
        numbers = sorted(int(found[1]) for found in matches if found is not None)
        return {number: segment_path(folder, number) for number in numbers}
    return {}


def _sizes(folder: Path) -> dict[str, int]:
    """Return the size in bytes of each segment, by file name."""
    return {path.name: path.stat().st_size for path in segments_of(folder).values()}


class VectorWriter:
    """A writer of vectors to the run in ``folder``. It begins a new segment file for each type of vectors.

    - ``first``: the lowest number for a new segment.
    - ``ends``: minimum size in bytes of each existing segment, by file name, from the last checkpoint.

    Raises:
        LostVectorError: a segment is missing, or is shorter than in ``ends``.
    """

    def __init__(self, folder: Path, first: int, ends: Mapping[str, int]) -> None:
        self._folder, self._first = folder, first
        self._open: dict[VectorType, _OpenSegment] = {}
        self.ends = dict(ends)
        self.check()
        self.ends |= _sizes(folder)

    def check(self) -> None:
        """Check that the segments are still in place.

        Raises:
            LostVectorError: a segment was removed or cut.
        """
        sizes = _sizes(self._folder)
        for name, end in self.ends.items():
            if (size := sizes.get(name, 0)) < end:
                raise LostVectorError(
                    f"{self._folder / VECTORS / name}: has {size} bytes, but {end} bytes were written: vectors are lost. {_ADVICE}"
                )

    def write(self, indexes: Sequence[int], vectors: Sequence[Vector]) -> list[VectorPlace]:
        """Write the vectors of the rows ``indexes`` and call fsync. Return the vectors' positions for the records.

        Raises:
            StoreError: the disk fails. Vectors written before are unchanged.
        """
        by_type: dict[VectorType, list[int]] = {}
        for number, vector in enumerate(vectors):
            by_type.setdefault(VectorType(vector.dtype.name, vector.shape[-1]), []).append(number)
        places: dict[int, VectorPlace] = {}
        for kind, numbers in by_type.items():
            with disk_errors(self._folder / VECTORS, advice=_IF_FULL):
                found = self._append(kind, [(indexes[n], vectors[n]) for n in numbers])
            places.update(zip(numbers, found, strict=True))
        return [places[number] for number in range(len(vectors))]

    def close(self) -> None:
        while self._open:
            _, segment = self._open.popitem()
            os.close(segment.file)

    def _append(self, kind: VectorType, rows: Sequence[tuple[int, Vector]]) -> list[VectorPlace]:
        segment = self._open.get(kind) or self._begin(kind)
        name = segment_path(self._folder, segment.number).name
        block = _batch(kind, rows).serialize()
        try:
            write_all(segment.file, memoryview(block))
            os.fsync(segment.file)
        except BaseException:  # the file's end is unknown now: continue in a new segment
            with suppress(OSError):
                os.ftruncate(segment.file, self.ends[name])
            os.close(self._open.pop(kind).file)
            raise
        self.ends[name] += block.size
        places = []
        for _, vector in rows:
            tokens = len(vector) if vector.ndim == 2 else None
            places.append(VectorPlace(segment.number, segment.rows, vector.shape[-1], tokens))
            segment.rows += tokens or 1
        return places

    def _begin(self, kind: VectorType) -> _OpenSegment:
        number = max([self._first, *(known + 1 for known in segments_of(self._folder))])
        path = segment_path(self._folder, number)
        path.parent.mkdir(exist_ok=True)
        file = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)
        try:
            head = _schema(kind).serialize()
            write_all(file, memoryview(head))
            sync_folder(path.parent)
            sync_folder(self._folder)
        except BaseException:
            os.close(file)
            path.unlink(missing_ok=True)
            raise
        self.ends[path.name] = head.size
        self._open[kind] = segment = _OpenSegment(number, file)
        return segment


@dataclass
class _OpenSegment:
    number: int
    file: int
    rows: int = 0


class Vectors:
    """A reader of the vectors of the run in ``folder``.

    Segments are opened on demand, and only the parts being read are in memory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._segments: dict[int, _Segment] = {}
        self._read_bytes = 0

    def of(self, record: Mapping[str, Any]) -> Vector:
        """Return a copy of the vector or matrix that ``record`` names. Raises LostVectorError or StoreError like
        ``read``."""
        place = VectorPlace(**record["embedding"])
        return self.read(record["index"], place).copy()

    def pooled(self, record: Mapping[str, Any]) -> Pooled | None:
        """Return the answer to a pooling task as the engine gave it, or None if ``record`` has no such answer. Raises the
        errors of ``of``."""
        vector, score = None, record.get("score")
        if (place := record.get("embedding")) is not None:
            vector = self.of(record).astype("<f4").tobytes()
        pooled = Pooled(
            vector,
            record.get("probabilities"),
            record.get("label"),
            [score] if isinstance(score, float | int) else score,
            (place or {}).get("tokens"),
            record.get("entities"),
        )
        return None if pooled == Pooled() else pooled

    def read(self, index: int, place: VectorPlace) -> Vector:
        """Return the vector or matrix of row ``index`` at ``place`` as a view of the mapped segment file.

        Raises:
            LostVectorError: The vector is missing, is damaged, or belongs to another row.
            StoreError: The segment's file can't be read.
        """
        segment = self._segment(place.segment, place.row)
        batch = bisect_right(segment.firsts, place.row) - 1
        end = place.row + (place.tokens or 1)
        if not 0 <= place.row < end <= segment.n_rows:
            raise self._error(segment, index, place, f"has {segment.n_rows:,} whole vectors")
        at = slice(place.row - segment.firsts[batch], end - segment.firsts[batch])
        indexes, vectors, checksums = (column[at] for column in segment.batches[batch])
        others = indexes[indexes != index]
        if vectors.shape != (end - place.row, place.dimensions) or len(others):
            owner = others[0] if len(others) else index
            found = f"has the vector of row {owner}, with {vectors.shape[1]:,} dimensions, at that place"
            raise self._error(segment, index, place, found)
        if any(zlib.crc32(v.data) != crc for v, crc in zip(vectors, checksums, strict=True)):
            raise self._error(segment, index, place, "is damaged at that place")
        vector: Vector = vectors[0] if place.tokens is None else vectors
        self._read_bytes += vector.nbytes
        if self._read_bytes > _RELEASE_BYTES:
            self._read_bytes = 0
            for opened in self._segments.values():
                opened.release()
        return vector

    def fault_at(self, index: int, place: VectorPlace) -> str | None:
        """Return a message if the vector of row ``index`` is missing, damaged or not finite; None if it is sound.

        ``place``: the vector's position according to the record.

        Raises:
            StoreError: the segment's file can't be read, so the vector's state is unknown.
        """
        import numpy as np

        try:
            is_finite = np.isfinite(self.read(index, place)).all()
        except LostVectorError as error:
            return str(error)
        return None if is_finite else f"the vector of row {index} is not finite"

    def type_of(self, number: int) -> VectorType | None:
        """Return the type of the vectors in the segment with this number; None if the segment has no vectors."""
        return self._segment(number, 0).type

    def _segment(self, number: int, row: int) -> _Segment:
        """Return the segment with this number. The segment is opened again if ``row`` is after its last vector, because
        the file may have grown."""
        found = self._segments.get(number)
        if found is None or row >= found.n_rows:
            found = self._segments[number] = _Segment(segment_path(self._folder, number))
        return found

    def _error(
        self, segment: _Segment, index: int, place: VectorPlace, fault: str
    ) -> LostVectorError:
        fault = fault if segment.path.exists() else "is missing"
        several = f"vectors {place.row} to {place.row + (place.tokens or 1) - 1}"
        named = f"vector {place.row}" if (place.tokens or 1) == 1 else several
        return LostVectorError(
            f"{segment.path}: {fault}; the record of row {index} names {named} of this file (counted from 0),"
            f" with {place.dimensions:,} dimensions. {_ADVICE}"
        )


class _Batch(NamedTuple):
    """A record batch: row indexes, a matrix of their vectors, and the vectors' checksums."""

    indexes: Vector
    vectors: Vector
    checksums: Vector


class _Segment:
    """The undamaged record batches of a segment's file, memory-mapped. A missing file has no batches.

    ``firsts``: for each batch, the number of its first vector within the segment.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.type: VectorType | None = None
        self.batches: list[_Batch] = []
        self.firsts: list[int] = []
        self.n_rows = 0
        self._view = _mapped(path)
        for batch in _whole_batches(self._view):
            columns = [batch["index"], batch["vector"].flatten(), batch["crc32"]]
            indexes, values, checksums = (column.to_numpy() for column in columns)
            self.type = VectorType(values.dtype.name, batch["vector"].type.list_size)
            vectors = values.reshape(len(batch), -1)
            self.batches.append(_Batch(indexes, vectors, checksums))
            self.firsts.append(self.n_rows)
            self.n_rows += len(batch)

    def release(self) -> None:
        """Let the kernel drop the file's pages that were read, so that memory does not grow."""
        if isinstance(self._view, mmap.mmap):
            self._view.madvise(mmap.MADV_DONTNEED)


def _schema(kind: VectorType) -> pa.Schema:
    import pyarrow as pa

    value = {"float32": pa.float32(), "float16": pa.float16()}[kind.dtype]
    vector = pa.list_(value, kind.dimensions)
    return pa.schema([("index", pa.int64()), ("vector", vector), ("crc32", pa.uint32())])


def _batch(kind: VectorType, rows: Sequence[tuple[int, Vector]]) -> pa.RecordBatch:
    import numpy as np
    import pyarrow as pa

    schema = _schema(kind)
    matrix = np.concatenate([np.atleast_2d(vector) for _, vector in rows])
    counts = [len(vector) if vector.ndim == 2 else 1 for _, vector in rows]
    indexes = pa.array(np.repeat([index for index, _ in rows], counts), pa.int64())
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(matrix.reshape(-1)), kind.dimensions)
    checksums = pa.array([zlib.crc32(vector.data) for vector in matrix], pa.uint32())
    return pa.RecordBatch.from_arrays([indexes, vectors, checksums], schema=schema)


def _mapped(path: Path) -> mmap.mmap | bytes:
    reading = disk_errors(path, "can't be read")
    with reading, suppress(FileNotFoundError), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b""
    return b""


def _whole_batches(view: mmap.mmap | bytes) -> Iterator[pa.RecordBatch]:
    """Yield the record batches before a torn end or damage."""
    import pyarrow as pa

    try:
        stream = pa.ipc.open_stream(pa.py_buffer(view))
        length = max(1, getattr(stream.schema.field("vector").type, "list_size", 1))
        if not any(stream.schema == _schema(VectorType(name, length)) for name in DTYPES):
            return
        for batch in stream:
            batch.validate(full=True)
            if any(column.null_count for column in batch.columns):
                return
            yield batch
    except (pa.ArrowException, OSError, KeyError, UnicodeError, MemoryError):
        return  # pyarrow raises these for an incomplete stream and for damaged bytes
