"""The table of a run's records, made from one record after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa

from batchkit.runs.inputs import InputColumns
from batchkit.runs.layout import Layout
from batchkit.runs.table import schema_of
from batchkit.storage.score_store import read_scored


def expected_table(folder: Path) -> pa.Table:
    """What an export of ``folder`` has to hold; vectors aside."""
    inputs = InputColumns(folder)
    layout = Layout.of(folder, inputs.names)
    schema = schema_of(layout)
    rows = [
        {
            name: _value(record, keys, schema.field(name).type)
            for name, (_, keys) in layout.columns.items()
        }
        for record in read_scored(folder)
        for record["fields"] in [inputs.of(record)]
    ]
    return pa.Table.from_pylist(rows, schema=schema)


def _value(record: Mapping[str, Any], keys: Sequence[str], kind: pa.DataType) -> Any:
    value: Any = record
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    if kind == pa.string() and value is not None and not isinstance(value, str):
        return orjson.dumps(value).decode()
    if pa.types.is_list(kind) and isinstance(value, float | int):
        return [value]
    return value
