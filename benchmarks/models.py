"""Models with random weights, for benchmarks for which the demo model is too small."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchkit.commands.demo_model import build_demo_model

FIRST_WORD, WORDS = 440, 180  # the demo model's whole words, roughly
# 23 million parameters: on two cores, matrix products dominate a step of 64 requests.
MEDIUM = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


def build_text_model(path: Path, shape: Mapping[str, Any], dtype: str = "float32") -> Path:
    """A Qwen2 of that shape with random weights and the demo model's tokenizer.

    It answers only in words: an answer of white space or special tokens would count as empty.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    build_demo_model(path, text_only=True)
    written = path / "config.json"
    config = json.loads(written.read_text()) | shape
    written.write_text(json.dumps(config))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    with torch.no_grad():
        model.lm_head.weight[:FIRST_WORD] = 0
        model.lm_head.weight[FIRST_WORD + WORDS :] = 0
    model.to(getattr(torch, dtype)).save_pretrained(path)
    return path
