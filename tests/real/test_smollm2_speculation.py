"""Speculative decoding with n-grams, where answers copy their prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.model_runs import answered
from tests.support.own_process import batchkit
from tests.support.real_models import reviews

pytestmark = pytest.mark.real

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}


def test_answers_stay_and_accepted_tokens_are_shown(tmp_path: Path, engine: dict[str, Any]) -> None:
    job = {
        "prompt": {"user": "Repeat this text word by word:\n\n{{ review }}"},
        "sampling": {"temperature": 0, "max_tokens": 40},
    }
    plain = answered(tmp_path, reviews(), name="plain", engine=engine, **job)
    options = {**engine["options"], "speculative_config": NGRAM}
    drafted = answered(tmp_path, name="drafted", engine={**engine, "options": options}, **job)
    assert [record["text"] for record in drafted] == [record["text"] for record in plain]
    for name, shows in (("plain", False), ("drafted", True)):
        status = batchkit("status", f"output/{name}", "--json", cwd=tmp_path)
        found = json.loads(status.stdout)["accepted_tokens_per_step"]
        print(f"{name}: {found} drafted tokens accepted per step")
        assert (found is not None and 0 < found <= 4) == shows
    text = batchkit("status", "output/drafted", cwd=tmp_path).stdout
    assert "drafted tokens accepted per step" in text
