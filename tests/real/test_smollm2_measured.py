"""``plan``, ``find-bs`` and ``tune`` on 500 rows of SmolLM2.

Tokens are asserted, rates and times only printed: they depend on what else the machine does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import Fork
from tests.support.model_runs import newest, run_job, write_job
from tests.support.own_process import batchkit
from tests.support.real_models import reviews

pytestmark = pytest.mark.real

N_ROWS = 500


@pytest.fixture(scope="module")
def folder(engine: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the job. Its first sentence tells the rows apart."""
    folder = tmp_path_factory.mktemp("measured")
    rows = [{**reviews()[n % 60], "place": f"Number {n}"} for n in range(N_ROWS)]
    options = {**engine["options"], "max_model_len": 256, "max_num_seqs": 8}
    write_job(
        folder,
        rows,
        engine={**engine, "options": options},
        prompt={"user": "{{ place }}. {{ review }} Was this good?"},
        sampling={"temperature": 0, "max_tokens": 6},
    )
    return folder


def measured(folder: Path, *args: str) -> dict[str, Any]:
    ended = batchkit(*args, "--json", cwd=folder, start=Fork, timeout_s=900)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def test_the_tokens_of_a_run_are_within_the_forecast(folder: Path) -> None:
    found = measured(folder, "plan", "job.toml")
    ran = json.loads(run_job(folder).stdout.splitlines()[-1])
    assert ran["skipped"] > 0, "the run keeps the sample's answers"
    usages = [record["usage"] for record in newest(folder)]
    for tokens in ("prompt_tokens", "completion_tokens"):
        total = sum(usage[tokens] for usage in usages)
        assert found[tokens]["low"] <= total <= found[tokens]["high"], tokens
    forecast = {name: round(value) for name, value in found["seconds"].items()}
    print(f"plan: {forecast} s; the run: {ran['seconds']:.0f} s")


def test_find_bs_finds_that_more_rows_at_once_are_faster(folder: Path) -> None:
    sizes = ("--low", "1", "--high", "16", "--seconds", "5")
    found = measured(folder, "find-bs", "job.toml", *sizes)
    rates = {one["batch_size"]: one["completion_tokens_per_s"] for one in found["batch_sizes"]}
    print(f"find-bs: {found['best']} is best of {rates}")
    assert found["best"] > 1
    assert rates[found["best"]] > rates[1]


def test_tune_ends_with_the_default_or_what_won_all_rounds(folder: Path) -> None:
    found = measured(folder, "tune", "job.toml", "--minutes", "3", "--seconds", "5")
    print(f"tune: {found['best']['options']}, {found['ratio']:.2f} × the default")
    assert found["ratio"] >= 1
    assert (found["ratio"] > 1) == bool(found["best"]["options"])
