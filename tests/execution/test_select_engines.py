"""``[select]`` over what real models sample."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import tomlkit

from tests.support.forks import Fork
from tests.support.own_process import batchkit
from tests.support.rows import read_jsonl, write_jsonl
from tests.support.small_vllm import SMALL

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("kind", ["vllm", "transformers"])
def test_what_an_engine_sampled_is_counted(kind: str, text_model: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [{"q": word} for word in ("tea", "milk", "snow", "bread")])
    options = SMALL if kind == "vllm" else {"dtype": "float32", "max_model_len": 512}
    job = {
        "name": "a",
        "input": {"path": "rows.jsonl"},
        "engine": {"kind": kind, "model": str(text_model), "options": options},
        "prompt": {"user": "{{ q }}"},
        "sampling": {"n": 6, "temperature": 1.0, "max_tokens": 4},
        "scoring": {"extract": "regex", "pattern": r"(\w)\w*"},
        "select": {"by": "majority"},
        "output": {"choices": True},
    }
    (tmp_path / "job.toml").write_text(tomlkit.dumps(job))
    ended = batchkit("run", "job.toml", cwd=tmp_path, start=Fork)
    assert ended.returncode in (0, 3), ended.stderr
    records = read_jsonl(tmp_path / "output/a/results.jsonl")
    answered = [record for record in records if record["status"] == "ok"]
    assert answered
    for record in answered:
        texts = [choice["text"] for choice in record["choices"]]
        found = [(re.findall(r"(\w)\w*", text) or [None])[-1] for text in texts]
        letters = [letter and letter.casefold() for letter in found]
        counts = Counter(filter(None, letters))
        assert sorted(record["votes"].values()) == sorted(counts.values())
        first = letters.index(counts.most_common(1)[0][0]) if counts else record["selected"]
        assert (record["selected"], record["text"]) == (first, texts[first])
