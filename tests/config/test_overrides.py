"""``--set``: what it replaces, and what a mistyped one says."""

from __future__ import annotations

from typing import Any

from batchkit.config.loading import make_job
from batchkit.config.tables import JobConfig


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
