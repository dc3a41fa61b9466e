"""LiteLLM's batch functions against ``batchkit serve``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.client_environment import answered, client_environment, run_client

pytestmark = pytest.mark.release


def test_litellm_gets_an_answer_for_each_row_of_a_batch(tmp_path: Path) -> None:
    litellm = client_environment("litellm", "litellm==1.110.2")
    printed = run_client("litellm", tmp_path, litellm, LITELLM_LOCAL_MODEL_COST_MAP="True")
    assert "completed BatchRequestCounts(completed=3, failed=0, total=3)" in printed
    for row in range(3):
        assert f"row-{row} dry-run: no model answered row {row}" in printed
    assert answered(tmp_path) == [3]
