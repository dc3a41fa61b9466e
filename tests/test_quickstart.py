"""The quickstart: its model reads the pictures, whichever engine runs it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from batchkit.config.loading import load_job
from batchkit.storage.identity import identity
from tests.support.forks import Fork
from tests.support.own_process import batchkit
from tests.support.paths import ROOT
from tests.support.rows import read_jsonl

pytestmark = pytest.mark.vllm

JOB = ROOT / "jobs" / "quickstart.toml"
DATA = ROOT / "jobs" / "data" / "quickstart"
QUESTIONS = read_jsonl(DATA / "questions.jsonl")


class Run(NamedTuple):
    answers: dict[str, str]
    exact: float


def share_of_exact(records: list[dict[str, Any]]) -> float:
    """An empty answer, which is a failed record, is none."""
    return sum(record["scores"].get("em", 0) for record in records) / len(records)


def run(folder: Path, *settings: str) -> Run:
    flags = [part for setting in settings for part in ("--set", setting)]
    done = batchkit("run", JOB, *flags, cwd=folder, start=Fork)
    assert done.returncode == 0, done.stderr
    records = read_jsonl(folder / "output/quickstart/results.jsonl")
    answers = {record["id"]: record["text"] for record in records}
    assert len(records) == len(answers) == len(QUESTIONS)
    return Run(answers, share_of_exact(records))


def test_the_model_is_in_the_package_and_has_its_figures_in_the_docs() -> None:
    model = Path(load_job(JOB).engine.model_source)
    assert model == ROOT / "batchkit" / "demo_model"
    weights = model / "model.safetensors"
    assert sum(path.stat().st_size for path in model.iterdir()) < 5 * 2**20
    page = (ROOT / "docs" / "demo-model.md").read_text(encoding="utf-8")
    assert hashlib.sha256(weights.read_bytes()).hexdigest() in page, (
        "the figures are of other weights: run scripts/publish_demo_model.py"
    )


def test_the_run_is_of_the_name_and_of_the_files_behind_it() -> None:
    found = identity(load_job(JOB))
    assert found.job["engine.model"] == "batchkit-demo"
    folder = load_job(JOB, [f"engine.model={load_job(JOB).engine.model_source}"])
    assert found.files["engine.model_files"] == identity(folder).files["engine.model_files"]
    assert "engine.commits" not in found.found


@pytest.fixture(scope="module")
def on_vllm(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("vllm"))


def test_nine_of_ten_questions_are_answered_right(on_vllm: Run) -> None:
    assert on_vllm.exact >= 0.9
    right = {str(asked["id"]): asked["answer"] for asked in QUESTIONS}
    equal = sum(answer == right[row] for row, answer in on_vllm.answers.items())
    assert equal / len(right) == on_vllm.exact


@pytest.mark.release
def test_transformers_gives_the_same_answers(on_vllm: Run, tmp_path: Path) -> None:
    by_transformers = run(
        tmp_path,
        "engine.kind=transformers",
        'engine.options={dtype = "float32", max_num_seqs = 8}',
    )
    assert by_transformers.answers == on_vllm.answers
    assert by_transformers.exact == on_vllm.exact
