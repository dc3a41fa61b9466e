"""Curator's batch mode against ``batchkit serve``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.client_environment import answered, client_environment, run_client

pytestmark = pytest.mark.release


def test_curator_gets_an_answer_for_each_row_of_a_batch(tmp_path: Path) -> None:
    curator = client_environment("curator", "bespokelabs-curator==0.1.31")
    cache = str(tmp_path / "curator")
    printed = run_client("curator", tmp_path, curator, CURATOR_CACHE_DIR=cache)
    for row, name in enumerate(("Bread", "Milk", "Iris")):
        assert f"{name} -> dry-run: no model answered row {row}" in printed
    assert answered(tmp_path) == [3]
