"""Values that a job file can't hold, or that no reader or writer can cope with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from batchkit.config.loading import load_job
from batchkit.config.tables import JobConfig
from batchkit.errors import JobError
from tests.support.dry_runs import job

DEEP = 5_000
HUGE = "9" * 5_000
LONG = f"s3://{'a' * 800_000}"


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"vars": {"a": None}}, "vars.a"),
        ({"vars": {"l": [1, None]}}, "vars.l.1"),
        ({"vars": {"t": {"a": None, "b": 1}}}, "vars.t.a"),
        ({"input": {"where": {"kind": None}}}, "input.where.kind"),
        ({"input": {"where": {"kind": ["a", None]}}}, "input.where.kind.1"),
        ({"prompt": {"chat_template_kwargs": {"t": None}}}, "prompt.chat_template_kwargs.t"),
        ({"prompt": {"tools": [{"function": {"name": None}}]}}, "prompt.tools.0.function.name"),
        ({"sampling": {"logit_bias": {"5": None}}}, "sampling.logit_bias.5"),
        ({"engine": {"kind": "dry-run", "options": {"a": {"b": None}}}}, "engine.options.a.b"),
    ],
)
def test_none_that_a_job_file_would_lose_is_refused(given: dict[str, Any], key: str) -> None:
    with pytest.raises(JobError, match=rf"{re.escape(key)}: found None"):
        JobConfig.model_validate({"engine": {"kind": "dry-run"}, **given})


def test_option_without_a_value_is_the_same_as_none_given() -> None:
    engine = {"kind": "dry-run", "options": {"latency_s": None}}
    given = JobConfig(engine=engine, sampling={"seed": None}, input={"limit": None})
    assert JobConfig.model_validate(given.model_dump()) == given


@pytest.mark.parametrize(
    "table", [{"media": {"root": LONG}}, {"input": {"path": LONG}}], ids="".join
)
@pytest.mark.timeout(20)
def test_long_text_in_place_of_a_path_is_looked_at_in_linear_time(table: dict[str, Any]) -> None:
    assert job(**table)


TOO_MUCH = {  # a job file, and what its one message names
    "vars": (f"[vars]\nx = 1\na = {'[' * DEEP}{']' * DEEP}", "can't be read: nested too deeply"),
    "tables": (f"vars.a = {'{a=' * DEEP}1{'}' * DEEP}", "can't be read: nested too deeply"),
    "less deep vars": (f"vars.a = {'[' * 150}{']' * 150}", "vars.a.0.0.0.0…: nested more than 100"),
    "dotted vars": (f"vars{'.a' * DEEP} = 1", "vars.a.a.a.a.a…: nested more than 100 deep"),
    "options": (f"engine.options.a{'.b' * 120} = 1", "engine.options.a.b.b.b…: nested more than"),
    "seed": (f"run.seed = {HUGE}", "can't be read: found a number of thousands of digits"),
    "long seed": (f"run.seed = {HUGE[:4000]}", "run.seed: found a number of"),
    "negative number": (f"vars.a = {-(2**63) - 1}", "vars.a: found a number of 65 bits"),
    "number": (f"vars.a = [1, {2**70}]", "vars.a.1: found a number of 71 bits"),
    "pattern": (f"[scoring.extract.regex]\npattern = '{'(' * DEEP}{')' * DEEP}'", "regex.pattern: "),
    "repetition": ("scoring.extract.regex.pattern = 'a{99999999999}'", "regex.pattern: "),
    "input.path": (f"input.path = '{{{{ {'(' * DEEP}1{')' * DEEP} }}}}'", "input.path: "),
}  # fmt: skip


@pytest.mark.parametrize("case", TOO_MUCH)
def test_what_breaks_a_reader_is_one_message(case: str, tmp_path: Path) -> None:
    text, expected = TOO_MUCH[case]
    path = tmp_path / "job.toml"
    engine = "[engine]\nkind" if text.startswith("[") else "engine.kind"
    path.write_text(f"{text}\n{engine} = 'dry-run'\n")
    with pytest.raises(JobError) as refused:
        load_job(path)
    assert expected in str(refused.value)
    assert len(str(refused.value)) < 500


def test_values_at_the_limit_are_a_job() -> None:
    deep: Any = 1
    for _ in range(98):
        deep = [deep]
    table = {"vars": {"a": deep, "b": [2**64 - 1, -(2**63)]}, "run": {"seed": 2**63}}
    assert job(**table).vars["a"] == deep
