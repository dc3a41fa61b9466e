"""The page exports a run to Lance and Delta, and reads both."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.environments import with_tables
from tests.support.how_to import run_page
from tests.support.paths import ROOT

pytestmark = pytest.mark.release


def test_the_tables_are_written_and_read(tmp_path: Path) -> None:
    environment = with_tables()
    printed = run_page(
        "lance-and-delta",
        tmp_path,
        environment=environment,
        replaced={'model = "Qwen/Qwen3-8B"': 'kind = "dry-run"'},
        variables={"PYTHONPATH": str(ROOT)},
    )
    assert "replies.lance: 3 rows, " in printed
    assert "replies.delta: 3 rows, " in printed
    assert "shape: (3, 2)" in printed
    assert "\n1 3\n" in printed
    again = [environment / "bin/batchkit", "export", "output/replies", "replies.delta"]
    subprocess.run(again, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
