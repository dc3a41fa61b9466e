"""LoRA adapters with random weights, for a model of Qwen's architecture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path, model: Path, *, rank: int = 8, seed: int = 0, strength: float = 0.5, **config: Any
) -> Path:
    """``config`` replaces keys of its ``adapter_config.json``."""
    import numpy as np
    from safetensors.numpy import save_file

    of_model = json.loads((model / "config.json").read_text())
    of_model = of_model.get("text_config", of_model)
    hidden, inner = of_model["hidden_size"], of_model["intermediate_size"]
    head = of_model.get("head_dim") or hidden // of_model["num_attention_heads"]
    heads = head * of_model["num_attention_heads"]
    kv_heads = head * of_model["num_key_value_heads"]
    sizes = {
        "q_proj": (hidden, heads),
        "o_proj": (heads, hidden),
        **dict.fromkeys(("k_proj", "v_proj"), (hidden, kv_heads)),
        **dict.fromkeys(("gate_proj", "up_proj"), (hidden, inner)),
        "down_proj": (inner, hidden),
    }
    random = np.random.default_rng(seed)
    modules = config.get("target_modules", MODULES[:4])
    tensors = {}
    for layer in range(of_model["num_hidden_layers"]):
        for module in modules:
            part = "self_attn" if module in MODULES[:4] else "mlp"
            place = f"base_model.model.model.layers.{layer}.{part}.{module}"
            n_in, n_out = sizes[module]
            a = random.normal(size=(rank, n_in)) / n_in**0.5
            b = random.normal(size=(n_out, rank)) * strength
            tensors[f"{place}.lora_A.weight"] = a.astype(np.float32)
            tensors[f"{place}.lora_B.weight"] = b.astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    found = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(modules),
        "base_model_name_or_path": str(model),
        "bias": "none",
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(found))
    return folder
