"""Parquet files of a run's table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchkit.runs.layout import EMBEDDING, Layout
from batchkit.runs.table import schema_of


def write_tables(
    path: Path, layout: Layout, tables: Iterator[pa.Table], about: Mapping[str, str]
) -> int:
    """Write ``tables``, which have the columns of ``layout``, to a Parquet file with the metadata ``about``. Return the
    number of rows."""
    schema, rows = schema_of(layout).with_metadata(about), 0
    others = [name for name in schema.names if name != EMBEDDING]
    with (
        # Compression does not make vectors smaller, only slower to read and write.
        pq.ParquetWriter(
            path, schema, compression=dict.fromkeys(others, "zstd"), use_dictionary=others
        ) as writer,
        ThreadPoolExecutor(1) as pool,  # reads the next table while this thread writes one
    ):
        coming = pool.submit(next, tables, None)
        while (table := coming.result()) is not None:
            coming = pool.submit(next, tables, None)
            writer.write_table(table)
            rows += table.num_rows
    return rows
