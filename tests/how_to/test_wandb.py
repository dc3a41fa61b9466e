"""Runs in W&B's offline mode, with its real client."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.client_environment import reader_environment
from tests.support.dry_runs import write_job
from tests.support.how_to import run_page
from tests.support.paths import ROOT
from tests.support.rows import write_jsonl

pytestmark = [pytest.mark.release, pytest.mark.timeout(900)]


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    environment = reader_environment("wandb", "wandb==0.31.0")
    write_jsonl(Path("in.jsonl"), [{"q": "?", "a": "A"} for _ in range(16)])
    write_job(
        engine={"kind": "dry-run", "options": {"latency_s": 0.5, "max_num_seqs": 8}},
        scoring={"reference": "a", "scorers": ["em"]},
    )
    printed = run_page(
        "wandb",
        tmp_path,
        environment=environment,
        variables={"WANDB_MODE": "offline", "PYTHONPATH": str(ROOT)},
        timeout_s=600,
    )
    summary = dict(re.findall(r"^wandb: +([\w/]+) ([\d.]+)$", printed, re.MULTILINE))
    assert summary["rows_ok"] == summary["score/n"] == "16"
    assert summary["score/em"] == "0"
    assert float(summary["rows_per_s"]) > 0
    (written,) = Path("wandb").glob("offline-run-*/*.wandb")
    assert b"max_num_seqs" in written.read_bytes()
