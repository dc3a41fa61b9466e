"""Pretrained models that ``make real-models`` has made, and texts for them."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from real_models.__main__ import DONE, default_cache

from tests.support.paths import ROOT
from tests.support.small_vllm import TEXT_ONLY

OPTIONS = {
    **TEXT_ONLY,
    "max_model_len": 1024,
    "max_num_seqs": 32,
    "kv_cache_memory_bytes": 512 * 2**20,
}


def real_model(name: str) -> Path:
    """Return the folder of a model. It must be there: ``make test-real`` makes it."""
    folder = default_cache() / name
    if not (folder / DONE).exists():
        pytest.fail(f"{folder} is missing: run `make real-models`")
    return folder


TOPICS = ["the sea", "a bridge", "winter", "bread", "a clock", "the moon", "a river", "tea"]
QUESTIONS = [
    f"{ask} {TOPICS[n % 8]} in {2 + n // 8} sentences."
    for n, ask in enumerate(["Describe", "Tell me about", "Write about"] * 20)
]


def reviews() -> list[dict[str, str]]:
    """Return 60 short reviews with their mood."""
    path = ROOT / "jobs/data/short_reviews.csv"
    with path.open(encoding="utf-8", newline="") as file:
        return [{"review": row["review"], "mood": row["mood"]} for row in csv.DictReader(file)]
