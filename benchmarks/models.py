"""Models with random weights, for benchmarks for which the demo model is too small."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchkit.commands.demo_model import build_demo_model

if TYPE_CHECKING:
    from torch import Tensor

FIRST_WORD, WORDS = 440, 180  # the demo model's whole words, roughly
# 23 million parameters: on two cores, matrix products dominate a step of 64 requests.
MEDIUM = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


SHARP = 5.0  # of queries and keys: with plain random weights all prompts are averaged alike


def build_ending_model(path: Path, *, text_only: bool = False) -> Path:
    """Build the demo model with answers that end after 2 to 200 tokens, half of them before 40."""
    from safetensors.torch import load_file, save_file

    build_demo_model(path, text_only=text_only)
    config = json.loads((path / "config.json").read_text())
    weights = load_file(path / "model.safetensors")
    _can_end(weights["lm_head.weight"], config.get("text_config", config)["eos_token_id"], 1.5)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def _can_end(head: Tensor, stop_token: int, gain: float) -> None:
    """Make the stop token as likely as ``gain`` times an average word, in its own contexts."""
    import torch

    draw = torch.Generator().manual_seed(1)
    spread = head[FIRST_WORD : FIRST_WORD + WORDS].std()
    head[stop_token] = torch.randn(head.shape[1], generator=draw) * spread * gain


def build_text_model(path: Path, shape: Mapping[str, Any], dtype: str = "float32") -> Path:
    """Build a Qwen2 of ``shape`` with random weights and the demo model's tokenizer.

    The model answers only in words, because an answer of white space or special tokens would count
    as empty. Its attention is sharp, so that answers differ. They end after 5 to several hundred
    tokens.
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
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= SHARP
            layer.self_attn.k_proj.weight *= SHARP
        _can_end(model.lm_head.weight, model.config.eos_token_id, 1.0)
    model.to(getattr(torch, dtype)).save_pretrained(path)
    return path
