"""The vectors of a run's records as an Arrow column."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from batchkit.config.tables import JobConfig
from batchkit.storage.log import RESULTS
from batchkit.storage.newest import read_newest
from batchkit.storage.vectors import Vectors, VectorType, segments_of
from batchkit.types import VectorPlace

if TYPE_CHECKING:
    import pyarrow as pa

EMBEDDING = "embedding"
# What a table of records has in its place: a record names its vector.
PLACE = {
    "embedding": (EMBEDDING, "row"),
    "embedding.segment": (EMBEDDING, "segment"),
    "embedding.dimensions": (EMBEDDING, "dimensions"),
}


def vector_type(folder: Path, job: JobConfig) -> VectorType | None:
    """The type of the vectors that the newest records name; None if the job's task is not embed."""
    if job.task != "embed":
        return None
    vectors = Vectors(folder)
    types = {vectors.type_of(number) for number in segments_of(folder)} - {None}
    if len(types) == 1:
        return types.pop()
    # Also where a segment is missing, or one is that of older records alone.
    named = (record.get(EMBEDDING) for record in read_newest(folder / RESULTS))
    lengths = {place["dimensions"] for place in named if place is not None}
    return VectorType(job.output.vector_dtype, lengths.pop() if len(lengths) == 1 else None)


def arrow_type(kind: VectorType) -> pa.DataType:
    """A fixed-size list; a list if the vectors have several lengths, or there are none."""
    import pyarrow as pa

    value = {"float32": pa.float32(), "float16": pa.float16()}[kind.dtype]
    return pa.list_(value) if kind.dimensions is None else pa.list_(value, kind.dimensions)


def with_vectors(tables: Iterable[pa.Table], folder: Path, kind: VectorType) -> Iterator[pa.Table]:
    """``tables`` with a column of vectors in place of those named in ``PLACE``.

    Raises:
        StoreError: a vector is not there, is damaged, or is another row's.
    """
    vectors = Vectors(folder)
    for table in tables:
        column = _column(table, vectors, kind)
        at = table.column_names.index(EMBEDDING)
        others = [name for name in PLACE if name != EMBEDDING]
        yield table.set_column(at, EMBEDDING, column).drop_columns(others)


def _column(table: pa.Table, vectors: Vectors, kind: VectorType) -> pa.Array:
    import numpy as np
    import pyarrow as pa

    if kind.dimensions is None:
        lists = [None if at is None else vectors.read(*at).tolist() for at in _places(table)]
        return pa.array(lists, arrow_type(kind))
    matrix = np.zeros((len(table), kind.dimensions), kind.dtype)
    is_null = np.zeros(len(table), bool)
    for number, at in enumerate(_places(table)):
        if at is None:
            is_null[number] = True
        else:
            matrix[number] = vectors.read(*at)
    values = pa.array(matrix.reshape(-1))
    return pa.FixedSizeListArray.from_arrays(values, kind.dimensions, mask=pa.array(is_null))


def _places(table: pa.Table) -> Iterator[tuple[int, VectorPlace] | None]:
    """Each record's index and the place of its vector; None for a record without one."""
    names = ["index", "embedding.segment", "embedding", "embedding.dimensions"]
    for index, segment, row, dimensions in zip(
        *(table[name].to_pylist() for name in names), strict=True
    ):
        yield None if row is None else (index, VectorPlace(segment, row, dimensions))
