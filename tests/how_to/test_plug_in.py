"""The page installs the example beside batchkit's wheel, and runs it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support import environments
from tests.support.how_to import run_page
from tests.support.paths import ROOT

pytestmark = pytest.mark.release


def test_the_example_is_installed_and_runs(tmp_path: Path) -> None:
    place = environments.installed(tmp_path / "env", environments.wheel(tmp_path / "dist"))
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    printed = run_page("plug-in", tmp_path, environment=place, variables={"PYTHONPATH": ""})
    assert "3 ok, 0 failed of 3 rows" in printed
    assert "ONCE\nUPON A TIME\nThey lived happily." in printed
    assert "the longest of 3 answers has 19 characters" in printed
