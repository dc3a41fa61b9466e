"""The client of autobatcher against ``batchkit serve``: as batches, and as responses in the background."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.client_environment import answered, client_environment, run_client

pytestmark = pytest.mark.release


def test_autobatcher_gets_all_answers_from_one_batch_and_one_in_the_background(
    tmp_path: Path,
) -> None:
    autobatcher = client_environment("autobatcher", "autobatcher==0.12.0")
    printed = run_client("autobatcher", tmp_path, autobatcher, LOGURU_LEVEL="WARNING")
    answers = [f"dry-run: no model answered row {row}" for row in range(3)]
    assert printed.splitlines() == [str(answers), answers[0]]
    assert answered(tmp_path) == [1, 3]
