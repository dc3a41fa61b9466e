"""Models with the shape of real ones, without weights: ``load_format = "dummy"`` makes random ones.

The folder is the demo model's with another ``config.json`` and a tokenizer with as many tokens as
the shape has: words that no prompt contains, so that any answer is text. What a step costs depends
only on the shape; the answers mean nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchkit.commands.demo_model import build_demo_model

Shape = Mapping[str, Any]  # keys of config.json, over the demo model's

TINY: Shape = {"vocab_size": 4096}
TINY_VL: Shape = {"text_config": {"vocab_size": 4096}}
QWEN2_HALF_B: Shape = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
QWEN25_7B: Shape = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
QWEN3_VL_2B: Shape = {
    "tie_word_embeddings": True,
    "text_config": {
        "tie_word_embeddings": True,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rope_scaling": {
            "rope_type": "default",
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
    },
    "vision_config": {
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [5, 11, 17],
    },
}


def build_shape(path: Path, shape: Shape, *, text_only: bool) -> Path:
    build_demo_model(path, text_only=text_only)
    (path / "model.safetensors").unlink()
    config = json.loads((path / "config.json").read_text().replace("float32", "bfloat16"))
    for key, value in shape.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    config["transformers_version"] = (
        "4.57.1"  # or it warns of so large a vocabulary, as if Mistral's
    )
    (path / "config.json").write_text(json.dumps(config, indent=2))
    _fill_vocabulary(path / "tokenizer.json", config.get("text_config", config)["vocab_size"])
    return path


def _fill_vocabulary(path: Path, size: int) -> None:
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    for number in range(len(vocabulary), size):
        vocabulary[f"Ġword{number}"] = number
    path.write_text(json.dumps(tokenizer, ensure_ascii=False))
