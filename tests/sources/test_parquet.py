"""Values of Parquet files are what the program that wrote them meant."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.support.sources import rows_of


def test_any_time_that_spark_has_written_is_that_time(tmp_path: Path) -> None:
    times = [datetime(9999, 12, 31), datetime(1, 1, 1), datetime(2026, 5, 1, 1, 2, 3, 456789), None]
    columns = {"at": pa.array(times), "all": pa.array([[time] for time in times])}
    file = tmp_path / "x.parquet"
    pq.write_table(pa.table(columns), file, use_deprecated_int96_timestamps=True)
    assert [row.fields for row in rows_of(file)] == [{"at": at, "all": [at]} for at in times]
