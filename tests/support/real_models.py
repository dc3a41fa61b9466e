"""Pretrained models that ``make real-models`` has made, and texts for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_models.__main__ import DONE, default_cache

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
THINGS = {
    "hotel": ("The room was clean and the staff were friendly.", "The room was dirty and loud."),
    "restaurant": ("The food was delicious.", "The food was cold and the waiter was rude."),
    "phone": ("The battery lasts for days.", "It broke after a week."),
    "film": ("I laughed and cried.", "I fell asleep after ten minutes."),
    "train": ("It was on time and comfortable.", "It was two hours late and crowded."),
    "concert": ("The band played with so much joy.", "The sound was so bad that we left."),
}
GOOD = ["I loved this {}! {}", "A great {}. {} I will come back.", "The best {} ever. {}"]
GOOD += ["What a wonderful {}. {}", "{1} I am very happy with this {0}."]
BAD = ["I hated this {}! {}", "A terrible {}. {} Never again.", "The worst {} ever. {}"]
BAD += ["What an awful {}. {}", "{1} I am very disappointed with this {0}."]


def reviews() -> list[dict[str, str]]:
    """Return 60 short reviews with their mood."""
    found = []
    for thing, (good, bad) in THINGS.items():
        found += [{"review": text.format(thing, good), "mood": "positive"} for text in GOOD]
        found += [{"review": text.format(thing, bad), "mood": "negative"} for text in BAD]
    return found
