"""An adapter for each row: each answers as ``vllm.LLM`` does with that adapter alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from batchkit.storage.newest import read_newest
from tests.support.adapters import write_adapter
from tests.support.forks import Fork
from tests.support.own_process import batchkit
from tests.support.rows import write_jsonl
from tests.support.small_vllm import SMALL
from tests.support.vllm_reference import with_loras

pytestmark = pytest.mark.vllm

OPTIONS = {name: value for name, value in SMALL.items() if name != "limit_mm_per_prompt"}
RANKS = {"a": 8, "b": 16, "c": 4, "d": 64, "e": 1}
TEXTS = [f"{'tea and ' * (n % 5)}question {n}: what is {7 * n}?" for n in range(12)]


@pytest.fixture(scope="module")
def adapters(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, (name, rank) in enumerate(RANKS.items()):
        write_adapter(folder / name, text_model, rank=rank, seed=seed)
    return folder


@pytest.fixture
def job(text_model: Path, adapters: Path, tmp_path: Path) -> Callable[..., None]:
    def write(rows: list[dict[str, Any]], names: str = "abcde", **tables: Any) -> None:
        write_jsonl(tmp_path / "in.jsonl", rows)
        found = {
            "name": "run",
            "input": {"path": "in.jsonl"},
            "prompt": {"user": "{{ q }}", "lora": "{{ adapter }}"},
            "engine": {
                "model": str(text_model),
                "options": OPTIONS,
                "loras": {name: str(adapters / name) for name in names},
            },
            "sampling": {"max_tokens": 12},
        }
        for key, table in tables.items():
            found[key] = {**found.get(key, {}), **table}
        (tmp_path / "job.toml").write_text(tomlkit.dumps(found))

    return write


def run(folder: Path, *settings: str) -> list[dict[str, Any]]:
    flags = [part for setting in settings for part in ("--set", setting)]
    done = batchkit("run", "job.toml", *flags, cwd=folder, start=Fork)
    assert done.returncode in (0, 3), done.stderr
    return list(read_newest(folder / "output/run/results.jsonl"))


@pytest.mark.parametrize("slots", [5, 2])
def test_rows_answer_as_with_their_adapter_alone(
    slots: int, job: Callable[..., None], text_model: Path, adapters: Path, tmp_path: Path
) -> None:
    """A third of the rows has none; in the order of the input, so that each batch has all kinds."""
    rows = [{"q": q, "adapter": name} for q in TEXTS for name in (*RANKS, None, "", None)]
    random.Random(0).shuffle(rows)
    options = {**OPTIONS, "max_loras": slots, "enable_prefix_caching": True}
    job(rows, engine={**_engine(text_model, adapters), "options": options}, run={"look_ahead": 1})
    found = run(tmp_path)
    calls = [{"lora": name and str(adapters / name), "texts": TEXTS} for name in (None, *RANKS)]
    expected = dict(
        zip((None, *RANKS), with_loras({**OPTIONS, "model": str(text_model)}, calls), strict=True)
    )
    for row, record in zip(rows, found, strict=True):
        right = expected[row["adapter"] or None][TEXTS.index(row["q"])]
        assert record["text"] == right, row
        assert record["lora"] == (row["adapter"] or "")
    assert len({text for texts in expected.values() for text in texts}) > 5 * len(TEXTS)


def _engine(model: Path, adapters: Path) -> dict[str, Any]:
    return {"model": str(model), "loras": {name: str(adapters / name) for name in RANKS}}
