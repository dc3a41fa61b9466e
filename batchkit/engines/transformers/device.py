"""The device that the model is on."""

from __future__ import annotations

import gc
from typing import Any


def default_device() -> str:
    """The first GPU if there is one, else the CPU."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def free_memory() -> None:
    """Release memory that nothing refers to any more."""
    import torch

    gc.collect()  # an error and its frames, which hold tensors, refer to each other
    torch.cuda.empty_cache()  # does nothing if no GPU is in use


def is_sound(device: Any) -> bool:
    """Whether it still computes: a GPU that has failed once also fails on everything later."""
    import torch

    try:
        return bool(torch.ones(1, device=device).add(1).item() == 2)
    except RuntimeError:
        return False
