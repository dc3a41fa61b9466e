"""LoRA adapters with random weights, whole and broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from batchkit.commands.demo_loras import write_lora


def write_adapter(
    folder: Path, model: Path, *, rank: int = 8, seed: int = 0, strength: float = 0.5, **config: Any
) -> Path:
    """``config`` replaces keys of its ``adapter_config.json``."""
    write_lora(folder, model, rank=rank, seed=seed, strength=strength)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder
