"""``validate`` also reports what fails no row, but is most likely a mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchkit.commands.validate import validate
from tests.support.command_line import batchkit
from tests.support.dry_runs import job, prepare


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("tables", "hint"),
    [
        ({"scoring": {"scorers": ["em"]}}, "scoring: em needs a right answer to compare with: set"),
        ({"scoring": {"scorers": ["em"], "reference": "keyy"}}, "scoring: the first row has no"),
        (  # each row would be answered with the job's parameters, and not with its own
            {"sampling": {"sampling_column": "keyy"}},
            "sampling.sampling_column: the first row has no field 'keyy'; did you mean 'key'?",
        ),
        ({}, None),
    ],
)
def test_likely_mistakes_are_found(tables: dict[str, Any], hint: str | None) -> None:
    prepare(3, **tables)
    result = batchkit("validate", "job.toml")
    assert result.exit_code == 0
    assert hint is None or hint in result.stdout
    assert len(batchkit("validate", "job.toml", "--json").json["hints"]) == (hint is not None)


@pytest.mark.parametrize("max_tokens", [100, 512, 4096])
def test_max_tokens_beyond_max_model_len_are_found(max_tokens: int, text_model: Path) -> None:
    Path("in.txt").write_text("one\ntwo\n")
    engine = {"kind": "transformers", "model": str(text_model), "options": {"max_model_len": 512}}
    made = job(input={"path": "in.txt"}, engine=engine, sampling={"max_tokens": max_tokens})
    found = validate(made)
    assert (found.ok, found.failed) == (2, 0)
    assert any(
        f"sampling.max_tokens: {max_tokens} leaves no room" in hint for hint in found.hints
    ) == (max_tokens >= 512)
