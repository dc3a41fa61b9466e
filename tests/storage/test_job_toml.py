"""``job.toml`` of a run folder: the job, from which a retry reads it back."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchkit.storage.job_toml import job_of_run, write_job
from tests.support.dry_runs import job

NAMES = st.text("abc .\"'\\\n=[é#", max_size=4)
VALUES = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(-1e9, 1e9) | NAMES,
    lambda part: st.lists(part, max_size=3) | st.dictionaries(NAMES, part, max_size=4),
    max_leaves=12,
)


@pytest.mark.slow
@given(VALUES)
def test_value_is_read_back_with_the_order_of_its_keys(value: Any) -> None:
    made = job(
        vars={"x": value, "y": 1},
        sampling={"structured_outputs": {"structural_tag": value}},
        prompt={"user": "x", "chat_template_kwargs": {"x": value, "y": 1}},
    )
    with tempfile.TemporaryDirectory() as folder:
        write_job(Path(folder), made)
        back = job_of_run(Path(folder))
    for table in ("vars", "sampling", "prompt"):
        then, now = (each.model_dump(mode="json")[table] for each in (made, back))
        assert json.dumps(then) == json.dumps(now)
