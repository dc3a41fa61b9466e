"""The records of a run as an Arrow table with the columns of a ``Layout``, alone or joined with the input rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import orjson
import pyarrow as pa

from batchkit.errors import ChangedInputError, InputError
from batchkit.runs.inputs import InputColumns
from batchkit.runs.layout import MATRIX, VECTOR, Column, Layout, free_name
from batchkit.sources import never
from batchkit.sources.input import Input, input_changes, watched
from batchkit.sources.rowhash import is_picture
from batchkit.storage.checkpoint import check_log
from batchkit.storage.job_toml import job_of_run
from batchkit.storage.lines import sound_record
from batchkit.storage.log import RESULTS
from batchkit.storage.newest_lines import WHOLE, NewestLog, Span
from batchkit.storage.plain_json import encoded, valid
from batchkit.storage.score_store import Scores
from batchkit.storage.starts import current_manifest
from batchkit.storage.vectors import Vectors, VectorType
from batchkit.types import Record

if TYPE_CHECKING:
    import pandas as pd

_BATCH = 10_000  # records
_BATCH_BYTES = 16 << 20


def schema_of(layout: Layout) -> pa.Schema:
    """Return the Arrow schema that every batch of the table has.

    Vectors are fixed-size lists, or lists of variable size if their lengths differ or are unknown.
    """
    return pa.schema(
        [
            (name, _arrow_type(column.type, layout.embedding))
            for name, column in layout.columns.items()
        ]
    )


def read_batches(
    folder: Path,
    layout: Layout,
    inputs: InputColumns | None = None,
    max_vector_bytes: int = 64 << 20,
    *,
    span: Span = WHOLE,
    chosen: Callable[[Record], bool] | None = None,
) -> Iterator[pa.Table]:
    """Yield batches with the newest record of each row in input order, with its newest scores.

    A batch has at most 10,000 records, 16 MB of log and ``max_vector_bytes`` of vectors, unless it is a single
    record. Only the current part of the log is in memory.

    - ``inputs``: columns of the input to add.
    - ``span``: read only this part of the log.
    - ``chosen``: leave out records for which this returns False.

    Raises:
        StoreError: A record is damaged, or its vector is missing, damaged, or belongs to another row.
    """
    path, schema, vectors = folder / RESULTS, schema_of(layout), Vectors(folder)
    scores = Scores(folder)
    with closing(NewestLog(path, span=span)) as newest:
        for part in _parts(newest):
            found = [
                sound_record(newest.view[line.start : line.end], path, line.start)
                for line in newest.lines(part)
            ]
            if chosen is not None:
                found = [*filter(chosen, found)]
            for records in _portions(found, layout.embedding, max_vector_bytes):
                _complete(records, scores, inputs)
                arrays = [
                    _vectors(records, vectors, field.type)
                    if column.type in (VECTOR, MATRIX)
                    else _array(records, column, field.type)
                    for column, field in zip(layout.columns.values(), schema, strict=True)
                ]
                yield pa.Table.from_arrays(arrays, schema=schema)
            newest.release()


def _complete(records: Sequence[Record], scores: Scores, inputs: InputColumns | None) -> None:
    """Add the newest scores and the input's columns to the records."""
    for record in records:
        line = scores.of(record.index, record.input_hash, record.finished_at)
        if line is not None:
            record.prediction, record.scores = line.prediction, line.scores
        if inputs is not None:
            names = ("index", "id", "input_hash", "fields")
            record.fields = inputs.of({name: getattr(record, name) for name in names})


def joined_table(folder: Path, source: Input) -> pa.Table:
    """Return a table with one line per row of ``source``, in its order: the row's fields, then its newest record.

    The record's columns are those of ``export --parquet``; they are null if a row has no record.

    - A field with the name of a record column gets the prefix ``fields.``. But if the field ``id`` identifies the rows
      (``input.id``), it replaces the record column ``id``.
    - A field whose values have no common Arrow type becomes text. A field with images is left out.
    - If the rows could be read only once, the result is the table of ``export --parquet``.

    Raises:
        InputError: The input can't be read, or changed since the run read it.
        StoreError: A record is damaged.
    """
    if source.files is None:
        return records_table(folder)
    check_log(folder)
    if changes := input_changes(current_manifest(folder).input, source.files):
        raise InputError(
            f"{folder}: its records were made from another input than these rows ({'; '.join(changes)}), so they"
            " can't be joined. Restore the old input, or use the records alone: Run(…).rows()"
        )
    try:
        rows = list(watched(source.read(never), source))
    except ChangedInputError as error:
        raise InputError(
            f"{', '.join(error.paths)}: changed since the run read it, so its rows may differ from"
            " the answered rows. Restore the old file, or use the records alone: Run(…).rows()"
        ) from error
    records = _table(folder, Layout.of(folder))
    table = _of_rows(records, [row.index for row in rows])
    if job_of_run(folder).input.id == "id":
        table = table.drop_columns("id")
    columns: dict[str, pa.Array] = {}
    for name, values in _fields([row.fields for row in rows]).items():
        if (column := _field(values)) is not None:
            columns[free_name(name, "fields.", [*columns, *table.column_names])] = column
    return pa.table({**columns, **{name: table[name] for name in table.column_names}})


def records_table(folder: Path) -> pa.Table:
    """Return the table of ``export --parquet``."""
    check_log(folder)
    inputs = InputColumns(folder)
    return _table(folder, Layout.of(folder, inputs.names), inputs)


def frame_of(table: pa.Table) -> pd.DataFrame:
    """Return a pandas DataFrame. Integer columns with missing values have type ``Int64``."""
    nullable = {  # as floats, two long ids could become equal
        column.name: str(column.type).title()
        for column in table.schema
        if str(column.type) in ("int32", "int64") and table[column.name].null_count
    }
    frame: pd.DataFrame = table.to_pandas(integer_object_nulls=True).astype(nullable)
    return frame


def _arrow_type(kind: str, embedding: VectorType | None) -> pa.DataType:
    if kind in (VECTOR, MATRIX) and embedding is not None:
        value = {"float32": pa.float32(), "float16": pa.float16()}[embedding.dtype]
        vector = pa.list_(value, embedding.dimensions or -1)
        return vector if kind == VECTOR else pa.list_(vector)
    inner = kind.removeprefix("list<").removesuffix(">")
    found = pa.type_for_alias(inner)
    return found if inner == kind else pa.list_(found)


def _parts(newest: NewestLog) -> Iterator[slice]:
    """Yield slices of rows that are read together."""
    n_bytes = np.cumsum(newest.sizes, dtype=np.int64)
    start = done = 0
    while start < len(n_bytes):
        fitting = int(np.searchsorted(n_bytes, done + _BATCH_BYTES, "right"))
        end = max(start + 1, min(start + _BATCH, fitting))
        yield slice(start, end)
        start, done = end, n_bytes[end - 1]


def _portions(
    records: Sequence[Record], embedding: VectorType | None, max_bytes: int
) -> Iterator[list[Record]]:
    """Split records into batches by the size of their vectors."""
    largest = 0 if embedding is None else 4 * (embedding.dimensions or 4096)  # bytes of a vector
    portion, n_bytes = list[Record](), 0
    for record in records:
        place = record.embedding
        size = 0 if place is None else largest * (1 if place.tokens is None else place.tokens)
        if portion and n_bytes + size > max_bytes:
            yield portion
            portion, n_bytes = [], 0
        portion.append(record)
        n_bytes += size
    if portion:
        yield portion


def _array(records: Sequence[Record], column: Column, kind: pa.DataType) -> pa.Array:
    first, *rest = column.keys
    values: Sequence[Any] = [*map(attrgetter(first), records)]
    for key in rest:
        values = [
            value.get(key) if value.__class__ is dict else getattr(value, key, None)
            for value in values
        ]
    if kind == pa.string():
        values = [v if v.__class__ is str or v is None else _as_text(v) for v in values]
    elif pa.types.is_list(kind):  # a row with one document, among rows with lists of documents
        values = [[v] if isinstance(v, float | int) else v for v in values]
    return pa.array(values, kind)


def _as_text(value: Any) -> str | None:
    return None if value is msgspec.UNSET else orjson.dumps(value).decode()


def _vectors(records: Sequence[Record], vectors: Vectors, kind: pa.DataType) -> pa.Array:
    found = [
        None if record.embedding is None else vectors.read(record.index, record.embedding)
        for record in records
    ]
    if pa.types.is_list(kind) and pa.types.is_fixed_size_list(kind.value_type):
        return _matrices(found, kind.value_type)
    if pa.types.is_nested(kind.value_type):
        return pa.array([None if one is None else one.tolist() for one in found], kind)
    if not pa.types.is_fixed_size_list(kind):
        none = np.zeros(0, kind.value_type.to_pandas_dtype())
        values = np.concatenate([none, *(one for one in found if one is not None)])
        return pa.ListArray.from_arrays(_ends(found), pa.array(values, kind.value_type))
    none = np.zeros(kind.list_size, kind.value_type.to_pandas_dtype())
    matrix = np.array([none if one is None else one for one in found])
    is_null = pa.array([one is None for one in found])
    return pa.FixedSizeListArray.from_arrays(matrix.reshape(-1), kind.list_size, mask=is_null)


def _matrices(found: Sequence[Any], vector: pa.DataType) -> pa.Array:
    none = np.zeros((0, vector.list_size), vector.value_type.to_pandas_dtype())
    values = np.concatenate([none, *(one for one in found if one is not None)]).reshape(-1)
    vectors = pa.FixedSizeListArray.from_arrays(values, vector.list_size)
    return pa.ListArray.from_arrays(_ends(found), vectors)


def _ends(found: Sequence[Any]) -> pa.Array:
    """Return the offsets of lists in an Arrow array; null for a list that is None."""
    ends = np.cumsum([0, *(0 if one is None else len(one) for one in found)])
    is_null = [*(one is None for one in found), False]
    return pa.array(ends, pa.int32(), mask=np.array(is_null))


def _table(folder: Path, layout: Layout, inputs: InputColumns | None = None) -> pa.Table:
    schema = schema_of(layout)
    return pa.concat_tables([schema.empty_table(), *read_batches(folder, layout, inputs)])


def _of_rows(records: pa.Table, rows: Sequence[int]) -> pa.Table:
    """Return one line of ``records`` for each of ``rows``; nulls for rows without a record. Both are ordered by row
    index."""
    wanted, known = np.array(rows, np.int64), records["index"].to_numpy()
    if not np.array_equal(wanted, known):
        places = np.searchsorted(known, wanted)
        is_missing = np.append(known, -1)[places] != wanted
        records = records.take(pa.array(places, mask=is_missing))
    return records.set_column(0, "index", pa.array(wanted))


def _fields(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the input's columns by name. A row that lacks a field has None in its column."""
    names = dict.fromkeys(name for fields in rows for name in fields)
    return {str(name): [fields.get(name) for fields in rows] for name in names}


def _field(values: Sequence[Any]) -> pa.Array | None:
    try:
        return pa.array(values)
    except Exception:  # mixed types, or an error from a value's Python code
        if any(map(is_picture, values)):
            return None
        return pa.array(map(_field_as_text, values), pa.string())


def _field_as_text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value and valid(value)
    return encoded(value).decode().strip()
