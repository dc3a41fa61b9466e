"""Small LoRA adapters with random weights, for models of Qwen's architecture: ``batchkit-demo`` and those that
``demo_model`` builds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from batchkit.config.regular_file import read_bytes
from batchkit.config.tables import DEMO_MODEL, EngineTable
from batchkit.engines.registry import require
from batchkit.errors import JobError

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LORAS = {"gentle": (0, 0.01), "rough": (3, 0.35)}
"""The seed of each adapter for ``batchkit-demo``, and how much it changes."""


def build_demo_loras(folder: Path) -> None:
    """Write the adapters ``gentle`` and ``rough`` for ``batchkit-demo`` to ``folder``, 50 KB each.

    Raises:
        JobError: one of them is there already, or can't be written.
    """
    require(("safetensors",), user="an adapter", extra="transformers")
    model = Path(EngineTable(model=DEMO_MODEL).model_source)
    for name, (seed, strength) in LORAS.items():
        if (folder / name).exists():
            raise JobError(f"{folder / name}: is there already; name another folder")
        try:
            write_lora(folder / name, model, rank=2, seed=seed, strength=strength)
        except OSError as error:
            raise JobError(f"{folder / name}: can't be written: {error}") from error


def write_lora(
    folder: Path,
    model: Path,
    *,
    rank: int,
    seed: int,
    strength: float,
    modules: Sequence[str] = _ATTENTION,
) -> None:
    """An adapter for ``model`` in PEFT's format; ``strength`` is about its share in what ``modules`` compute."""
    from safetensors.numpy import save

    random, tensors = np.random.default_rng(seed), {}
    config = orjson.loads(read_bytes(model / "config.json"))
    part = "language_model." if "text_config" in config else ""
    of_text = config.get("text_config", config)
    sizes = _sizes_of(of_text)
    for layer in range(of_text["num_hidden_layers"]):
        for module in modules:
            home = "self_attn" if module in _ATTENTION else "mlp"
            place = f"base_model.model.model.{part}layers.{layer}.{home}.{module}"
            n_in, n_out = sizes[module]
            a = random.normal(size=(rank, n_in)) / n_in**0.5
            b = random.normal(size=(n_out, rank)) * strength
            tensors[f"{place}.lora_A.weight"] = a.astype(np.float32)
            tensors[f"{place}.lora_B.weight"] = b.astype(np.float32)
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": [*modules],
        "base_model_name_or_path": model.name,
        "bias": "none",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(save(tensors))
    (folder / "adapter_config.json").write_bytes(orjson.dumps(about, option=orjson.OPT_INDENT_2))


def _sizes_of(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each module."""
    hidden, inner, heads = (
        config[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    head = config.get("head_dim") or hidden // heads
    kv = head * config["num_key_value_heads"]
    return {
        "q_proj": (hidden, head * heads),
        **dict.fromkeys(("k_proj", "v_proj"), (hidden, kv)),
        "o_proj": (head * heads, hidden),
        **dict.fromkeys(("gate_proj", "up_proj"), (hidden, inner)),
        "down_proj": (inner, hidden),
    }
