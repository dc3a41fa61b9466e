"""Options with which vLLM runs a demo model on a CPU."""

from __future__ import annotations

SMALL = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 32 * 2**20,
    "limit_mm_per_prompt": {"image": 2, "video": 0},
}
TEXT_ONLY = {name: value for name, value in SMALL.items() if name != "limit_mm_per_prompt"}
