"""Values from Python that a job file can't hold."""

from __future__ import annotations

import re
from typing import Any

import pytest

from batchkit.config.tables import JobConfig
from batchkit.errors import JobError


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"vars": {"a": None}}, "vars.a"),
        ({"vars": {"l": [1, None]}}, "vars.l.1"),
        ({"vars": {"t": {"a": None, "b": 1}}}, "vars.t.a"),
        ({"input": {"where": {"kind": None}}}, "input.where.kind"),
        ({"input": {"where": {"kind": ["a", None]}}}, "input.where.kind.1"),
        (
            {"prompt": {"chat_template_kwargs": {"tools": None}}},
            "prompt.chat_template_kwargs.tools",
        ),
        ({"prompt": {"tools": [{"function": {"name": None}}]}}, "prompt.tools.0.function.name"),
        ({"sampling": {"logit_bias": {"5": None}}}, "sampling.logit_bias.5"),
        (
            {"engine": {"kind": "dry-run", "options": {"a": {"b": None}}}},
            "engine.options.a.b",
        ),
    ],
)
def test_none_that_a_job_file_would_lose_is_refused(given: dict[str, Any], key: str) -> None:
    with pytest.raises(JobError, match=rf"{re.escape(key)}: found None"):
        JobConfig.model_validate({"engine": {"kind": "dry-run"}, **given})


def test_option_without_a_value_is_the_same_as_none_given() -> None:
    engine = {"kind": "dry-run", "options": {"latency_s": None}}
    given = JobConfig(engine=engine, sampling={"seed": None}, input={"limit": None})
    assert JobConfig.model_validate(given.model_dump()) == given
