"""``--set``: what it replaces, and what a mistyped one says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchkit.config.loading import make_job
from batchkit.config.tables import JobConfig
from batchkit.errors import JobError
from tests.support.command_line import batchkit


def job(*overrides: str, **given: Any) -> JobConfig:
    return make_job({"engine": {"kind": "dry-run"}, **given}, "job.toml", overrides)


def test_dry_run_in_place_of_any_engine_leaves_out_what_only_that_knows() -> None:
    server = {"kind": "openai-server", "model": "m", "base_url": "http://h/v1"}
    vllm = {"model": "n", "lora": "l", "options": {"max_model_len": 9}}
    for engine in (server, vllm):
        scoring = {"judge": {"engine": dict(vllm)}}
        both = "engine.kind=dry-run", "scoring.judge.engine.kind=dry-run"
        found = job(*both, engine=dict(engine), scoring=scoring)
        assert (found.engine.kind, found.engine.model) == ("dry-run", engine["model"])
        assert (found.engine.options, found.engine.base_url, found.engine.lora) == ({}, None, None)
        assert found.scoring.judge is not None
        assert found.scoring.judge.engine.options == {}
    with_own = job("engine.options.latency_s=1", "engine.kind=dry-run", engine=vllm)
    assert with_own.engine.options == {"latency_s": 1}
    kept = job("engine.kind=dry-run", engine={"kind": "dry-run", "options": {"latency_s": 1}})
    assert kept.engine.options == {"latency_s": 1}


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("limit=5", "limit: unknown key; did you mean 'input.limit'?"),
        ("temperature=1", "did you mean 'sampling.temperature'?"),
        (
            "engine.max_tokens=5",
            "engine.max_tokens: unknown key; did you mean 'sampling.max_tokens'?",
        ),
        ("user=x", "did you mean 'prompt.user'?"),
        ("max_model_len=5", "vLLM's options belong in [engine.options]"),
        ("engine.enforce_eager=true", "vLLM's options belong in [engine.options]"),
    ],
)
def test_key_without_its_table_is_suggested_with_it(given: str, hint: str) -> None:
    with pytest.raises(JobError) as refused:
        job(given)
    assert hint in str(refused.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["limit", "5"], "--set limit: write KEY=VALUE in one word, as in --set input.limit=…"),
        (
            ["input.limit", "=", "5"],
            "--set input.limit: write KEY=VALUE in one word, as in --set i",
        ),
        (["max_model_len", "5"], "as in --set sampling.temperature=…"),
    ],
)
@pytest.mark.parametrize("command", ["run", "validate", "retry-failed", "score"])
def test_value_in_a_word_of_its_own_says_how_to_write_it(
    command: str, words: list[str], message: str, tmp_path: Path
) -> None:
    result = batchkit(command, "job.toml", "--set", *words)
    assert result.exit_code == 2
    assert result.stderr.startswith("batchkit: error: ")
    assert message in result.stderr
