"""An evaluation of Inspect against ``batchkit serve``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.client_environment import answered, client_environment, run_client

pytestmark = pytest.mark.release


def test_inspect_scores_the_answers_of_a_batch(tmp_path: Path) -> None:
    inspect = client_environment("inspect", "inspect-ai==0.3.285", "openai==3.57.0")
    printed = run_client("inspect", tmp_path, inspect)
    assert "with 3 requests" in printed
    assert re.search(r"accuracy +\d", printed)
    assert answered(tmp_path) == [3]
