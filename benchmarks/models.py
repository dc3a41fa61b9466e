"""Models of random weights for the benchmarks where the demo model is too small to mean anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchkit.commands.demo_model import build_demo_model

FIRST_WORD, WORDS = 440, 180  # the demo model's whole words, roughly
# 23 million parameters: on two cores a step of 64 costs its matrix products, not its overhead.
MEDIUM = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


def build_text_model(path: Path, shape: Mapping[str, Any], dtype: str = "float32") -> Path:
    """A Qwen2 of that shape, drawn at random, with the demo model's tokenizer.

    It answers in words alone: an answer of white space or special tokens would be none.
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
