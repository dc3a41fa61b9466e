"""The rows of the input beside their records, as one Arrow table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from batchkit.errors import ChangedInputError, InputError
from batchkit.runs.layout import Layout
from batchkit.runs.table import read_batches, schema_of
from batchkit.sources import never
from batchkit.sources.input import Input, input_changes, watched
from batchkit.sources.rowhash import is_picture
from batchkit.storage.checkpoint import check_log
from batchkit.storage.job_toml import job_of_run
from batchkit.storage.manifest import read_manifest

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


def joined_table(folder: Path, source: Input) -> pa.Table:
    """A line for each row of ``source``, in its order: the row's fields, then its newest record.

    The record's columns are those of ``export --parquet``. They are null where a row has no record
    yet. A field with the name of such a column gets the prefix ``fields.``; a field ``id`` that
    names the rows takes that column's place. A field whose values have no common Arrow type is
    text; one that holds images is left out. Rows that could be read only once are not read again:
    then the table is that of ``export --parquet``.

    Raises:
        InputError: the input can't be read, or is no longer what the run has read.
        StoreError: a record is damaged.
    """
    import pyarrow as pa

    if source.files is None:
        return records_table(folder)
    layout = Layout.of(folder)
    check_log(folder)
    if changes := input_changes(read_manifest(folder).input, source.files):
        raise InputError(
            f"{folder}: its records are of another input now ({'; '.join(changes)}), so they are not put"
            " beside these rows. Use the summary of the last start, or records()"
        )
    try:
        rows = list(watched(source.read(never), source))
    except ChangedInputError as error:
        raise InputError(
            f"{', '.join(error.paths)}: changed since the run read it, so its rows may be others than"
            " those that were answered. Bring the old one back, or use records(), which need no input"
        ) from error
    records = _table(folder, layout._replace(keep=()))
    table = _of_rows(records, [row.index for row in rows])
    if job_of_run(folder).input.id == "id":
        table = table.drop_columns("id")
    columns: dict[str, pa.Array] = {}
    for name, values in _fields([row.fields for row in rows]).items():
        while name in columns or name in table.column_names:
            name = f"fields.{name}"
        if (column := _column(values)) is not None:
            columns[name] = column
    return pa.table({**columns, **{name: table[name] for name in table.column_names}})


def records_table(folder: Path) -> pa.Table:
    """The table of ``export --parquet``."""
    check_log(folder)
    return _table(folder, Layout.of(folder))


def frame_of(table: pa.Table) -> pd.DataFrame:
    """``table`` in pandas; whole numbers of which some are missing have its type ``Int64``."""
    nullable = {  # as floats, two long ids may be equal
        column.name: str(column.type).title()
        for column in table.schema
        if str(column.type) in ("int32", "int64") and table[column.name].null_count
    }
    frame: pd.DataFrame = table.to_pandas(integer_object_nulls=True).astype(nullable)
    return frame


def _table(folder: Path, layout: Layout) -> pa.Table:
    import pyarrow as pa

    schema = schema_of(layout)
    return pa.concat_tables([schema.empty_table(), *read_batches(folder, layout)])


def _of_rows(records: pa.Table, rows: Sequence[int]) -> pa.Table:
    """The record of each of ``rows``, or nulls. Both are ordered by the rows' indexes."""
    import numpy as np
    import pyarrow as pa

    wanted, known = np.array(rows, np.int64), records["index"].to_numpy()
    if not np.array_equal(wanted, known):
        places = np.searchsorted(known, wanted)
        is_missing = np.append(known, -1)[places] != wanted
        records = records.take(pa.array(places, mask=is_missing))
    return records.set_column(0, "index", pa.array(wanted))


def _fields(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The values of each field, None in rows that lack it."""
    names = dict.fromkeys(name for fields in rows for name in fields)
    return {str(name): [fields.get(name) for fields in rows] for name in names}


def _column(values: Sequence[Any]) -> pa.Array | None:
    import pyarrow as pa

    try:
        return pa.array(values)
    except Exception:  # mixed types, or what a value's own code raises
        if any(map(is_picture, values)):
            return None
        return pa.array(map(_as_text, values), pa.string())


def _as_text(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        try:
            return orjson.dumps(value, default=repr, option=orjson.OPT_NON_STR_KEYS).decode()
        except Exception:  # a number of thousands of digits, or an object that can't be shown
            return f"({type(value).__name__})"
    return value.encode("utf-8", "replace").decode()  # half a character can't be stored
