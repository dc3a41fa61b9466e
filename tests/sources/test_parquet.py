"""Values of Parquet files are what the program that wrote them meant, read in bounded memory."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchkit.config.tables import InputTable
from batchkit.errors import InputError
from batchkit.sources import count_rows, read_rows
from tests.support.sources import rows_of

MEGABYTE = 2**20
MEASURED = """
import re, sys
from pathlib import Path
from batchkit.config.tables import InputTable
from batchkit.sources import read_rows
n_rows = n_bytes = 0
def size(value):
    if isinstance(value, dict):
        return sum(map(size, value.values()))
    return sum(map(size, value)) if isinstance(value, list) else len(value)
for row in read_rows(InputTable(path=sys.argv[1])):
    n_rows += 1
    n_bytes += size(row.fields) if row.error is None else 0
peak_kb = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]
print(n_rows, n_bytes >> 20, int(peak_kb) >> 10)
"""


def measured(path: Path) -> tuple[int, int, int]:
    """Rows, MiB of values and MiB of memory at the peak, in a process of its own."""
    ended = subprocess.run(
        ["prlimit", f"--as={8 * 2**30}", sys.executable, "-c", MEASURED, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-500:]
    rows, value_mb, peak_mb = map(int, ended.stdout.split())
    return rows, value_mb, peak_mb


def large(n_values: int, kind: Any = "string") -> pa.Array:
    """One value of 1 MiB for all rows."""
    value = pa.array(["x" * MEGABYTE]).cast(kind)
    return pa.DictionaryArray.from_arrays(pa.array([0] * n_values, pa.int32()), value)


COLUMNS = {
    "text": lambda: large(1024),
    "fixed width": lambda: large(1024, pa.binary(MEGABYTE)),
    "structs": lambda: pa.StructArray.from_arrays([large(1024)], ["a"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", COLUMNS)
def test_a_value_shared_by_many_rows_is_not_held_for_all(tmp_path: Path, kind: str) -> None:
    """Once 3.1 GB for 53 KB."""
    path = tmp_path / "x.parquet"
    table = pa.table({"q": COLUMNS[kind]()})
    pq.write_table(table, path, store_schema=False, dictionary_pagesize_limit=2**30)
    assert path.stat().st_size < 200_000
    rows, value_mb, peak_mb = measured(path)
    assert (rows, value_mb) == (1024, 1024)
    assert peak_mb < 800


def test_values_of_a_dictionary_are_as_they_were(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {
            "text": ["a", "é", None][n % 3],
            "bytes": [b"\xff", None][n % 2],
            "list": [None, [], ["a", None, "b"]][n % 3],
            "struct": {"s": "x", "l": [{"k": b"v"}]} if n % 4 else None,
            "map": [("k", "v"), ("l", None)] if n % 5 else [],
            "n": n,
            "category": f"kind {n % 7}",
        }
        for n in range(3000)
    ]
    inner = pa.list_(pa.struct([("k", pa.binary())]))
    types = {
        "text": pa.string(),
        "bytes": pa.binary(),
        "list": pa.list_(pa.string()),
        "struct": pa.struct([("s", pa.string()), ("l", inner)]),
        "map": pa.map_(pa.string(), pa.string()),
        "n": pa.int64(),
        "category": pa.dictionary(pa.int32(), pa.string()),
    }
    found = pa.Table.from_pylist(rows, pa.schema(types))
    pq.write_table(found, tmp_path / "x.parquet", row_group_size=1700)
    table = InputTable(path=str(tmp_path / "x.parquet"))
    assert [row.fields for row in read_rows(table)] == rows
    assert count_rows(table) == 3000
    some = [row.fields for row in read_rows(table, skip=lambda index: index % 100 != 7)]
    assert some == rows[7::100]


def test_row_group_that_arrow_reads_without_its_rows_stops_the_reading(tmp_path: Path) -> None:
    """Arrow 26 reads no row of it, as its first page has no values, and raises nothing."""
    tags = pa.array([["a"], ["b"], ["c" * 100]], pa.list_(pa.dictionary(pa.int32(), pa.string())))
    table = pa.table({"q": ["a", "b", "c"], "tags": tags})
    path = tmp_path / "x.parquet"
    pq.write_table(table, path, row_group_size=2, data_page_size=16)
    assert list(pq.ParquetFile(path).iter_batches(row_groups=[1])) == []
    with pytest.raises(InputError, match="row group 1 has 1 rows, but Arrow read only 0"):
        rows_of(path)


def test_any_time_that_spark_has_written_is_that_time(tmp_path: Path) -> None:
    times = [datetime(9999, 12, 31), datetime(1, 1, 1), datetime(2026, 5, 1, 1, 2, 3, 456789), None]
    columns = {"at": pa.array(times), "all": pa.array([[time] for time in times])}
    file = tmp_path / "x.parquet"
    pq.write_table(pa.table(columns), file, use_deprecated_int96_timestamps=True)
    assert [row.fields for row in rows_of(file)] == [{"at": at, "all": [at]} for at in times]
