"""The page reads a run with DuckDB, in which one row was retried."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.environments import with_tables
from tests.support.how_to import run_page
from tests.support.paths import ROOT

pytestmark = pytest.mark.release


def test_the_newest_record_of_each_row_is_read(tmp_path: Path) -> None:
    printed = run_page(
        "duckdb",
        tmp_path,
        environment=with_tables(),
        variables={"PYTHONPATH": str(ROOT)},
    )
    for line in (
        "│     3 │",
        "│ b       │ note    │       2 │ NULL    │",
    ):
        assert line in printed
