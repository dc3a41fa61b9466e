"""Small LoRA adapters with random weights, for ``batchkit-demo`` and the models of ``demo_model``."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import orjson

from batchkit.config.tables import DEMO_MODEL, EngineTable
from batchkit.engines.registry import require
from batchkit.errors import JobError

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_ADAPTED = re.compile(rf"(.*\blayers\.(\d+)\.self_attn\.({'|'.join(_ATTENTION)}))\.weight")
LORAS = {"gentle": (0, 0.01), "rough": (3, 0.35)}
"""The seed and the strength of each adapter for ``batchkit-demo``."""


def build_demo_loras(folder: Path) -> None:
    """Write the adapters ``gentle`` and ``rough`` for ``batchkit-demo`` to ``folder``, 50 KB each.

    Raises:
        JobError: One of them exists already, or can't be written.
    """
    require(("safetensors",), user="an adapter", extra="transformers")
    model = Path(EngineTable(model=DEMO_MODEL).model_source)
    for name, (seed, strength) in LORAS.items():
        if (folder / name).exists():
            raise JobError(f"{folder / name}: exists already; give another folder")
        try:
            write_lora(folder / name, model, rank=2, seed=seed, strength=strength)
        except OSError as error:
            raise JobError(f"{folder / name}: can't be written: {error}") from error


def write_lora(folder: Path, model: Path, *, rank: int, seed: int, strength: float) -> None:
    """Write an adapter for the attention projections of ``model``, in PEFT's format. ``strength`` is the standard
    deviation of the B matrices: 0.01 hardly changes answers, 0.35 changes them a lot."""
    from safetensors import safe_open
    from safetensors.numpy import save

    random, tensors = np.random.default_rng(seed), {}
    with safe_open(model / "model.safetensors", "np") as weights:
        found = [name for name in map(_ADAPTED.fullmatch, weights.keys()) if name is not None]
        for name in sorted(found, key=lambda name: (int(name[2]), _ATTENTION.index(name[3]))):
            n_out, n_in = weights.get_slice(name[0]).get_shape()
            a = random.normal(size=(rank, n_in)) / n_in**0.5
            b = random.normal(size=(n_out, rank)) * strength
            tensors[f"base_model.model.{name[1]}.lora_A.weight"] = a.astype(np.float32)
            tensors[f"base_model.model.{name[1]}.lora_B.weight"] = b.astype(np.float32)
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": _ATTENTION,
        "base_model_name_or_path": model.name,
        "bias": "none",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(save(tensors))
    (folder / "adapter_config.json").write_bytes(orjson.dumps(about, option=orjson.OPT_INDENT_2))
