"""The vectors of a run's records as an Arrow column."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchkit.config.tables import JobConfig
from batchkit.storage.ledger import RESULTS
from batchkit.storage.newest import read_newest
from batchkit.storage.vectors import VectorPlace, Vectors, VectorType, segments_of

if TYPE_CHECKING:
    import numpy as np
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
    import pyarrow as pa

    vectors = Vectors(folder)
    for table in tables:
        names = ["index", "embedding.segment", "embedding", "embedding.dimensions"]
        places = zip(*(table[name].to_pylist() for name in names), strict=True)
        found = [
            None if row is None else vectors.read(index, VectorPlace(segment, row, dimensions))
            for index, segment, row, dimensions in places
        ]
        column = table.column_names.index(EMBEDDING)
        field = pa.field(EMBEDDING, arrow_type(kind))
        yield table.set_column(column, field, _column(found, kind)).drop_columns(
            [name for name in PLACE if name != EMBEDDING]
        )


def _column(found: list[np.ndarray[Any, Any] | None], kind: VectorType) -> pa.Array:
    import numpy as np
    import pyarrow as pa

    if kind.dimensions is None:
        return pa.array(found, arrow_type(kind))
    matrix = np.zeros((len(found), kind.dimensions), kind.dtype)
    for row, vector in zip(matrix, found, strict=True):
        if vector is not None:
            row[:] = vector
    is_null = pa.array([vector is None for vector in found], pa.bool_())
    values = pa.array(matrix.reshape(-1))
    return pa.FixedSizeListArray.from_arrays(values, kind.dimensions, mask=is_null)
