"""Files of rows in each format, and what is read from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from openpyxl import Workbook

from batchkit.config.tables import InputTable
from batchkit.sources import read_rows
from batchkit.types import Row

ROWS = [
    {"id": "a", "kind": "Fact", "year": 2020},
    {"id": "b", "kind": "Count", "year": 2021},
    {"id": "c", "kind": "Fact", "year": 2021},
    {"id": "d", "kind": "Trend", "year": 2020},
]


def table(path: Path | str, **keys: Any) -> InputTable:
    return InputTable(path=str(path), **keys)


def rows_of(path: Path | str, **keys: Any) -> list[Row]:
    return list(read_rows(table(path, **keys)))


def write(folder: Path, name: str, content: bytes | str) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_rows(folder: Path, name: str, rows: list[dict[str, Any]] = ROWS) -> Path:
    """``rows`` in the format that the suffix of ``name`` names."""
    path = folder / name
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    elif path.suffix == ".xlsx":
        workbook = Workbook()
        for row in [[*rows[0]], *([*row.values()] for row in rows)]:
            workbook.active.append(row)
        workbook.save(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
        path.write_text("\n".join(lines) + "\n")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
