"""What a test or a benchmark with llama.cpp needs: its server, and a model as it reads it.

The model is made of a folder with a Qwen2: weights, tokenizer, chat template. The format is
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, as much of it as that takes.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
NORMAL, CONTROL, UNUSED = 1, 3, 5  # kinds of tokens
ALIGNMENT = 32
LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}

_BESIDE_PYTHON = Path(sys.executable).parent
_NOT_BUILT = _BESIDE_PYTHON.parent / ".llama-server-missing"  # scripts/llama_server.sh says why
NONE_FOUND = (
    _NOT_BUILT.read_text().strip()
    if _NOT_BUILT.is_file()
    else "no llama-server: none on PATH or beside Python, and LLAMA_SERVER names none"
)


def llama_server() -> str | None:
    """The program's path, if there is one."""
    return (
        os.environ.get("LLAMA_SERVER")
        or shutil.which("llama-server")
        or shutil.which("llama-server", path=_BESIDE_PYTHON)
    )


def kill_servers(run: subprocess.Popen[str], log: Path, at: Sequence[int]) -> int:
    """Kill the server of ``run`` each time its log has the next number of lines in ``at``; how often
    that was, when the run ends or after two minutes."""
    import psutil

    killed, deadline = 0, time.monotonic() + 120
    while killed < len(at) and run.poll() is None and time.monotonic() < deadline:
        if log.exists() and log.read_bytes().count(b"\n") >= at[killed]:
            for server in psutil.Process(run.pid).children(recursive=True):
                if server.name() == "llama-server":
                    server.kill()
                    killed += 1
        time.sleep(0.005)
    return killed


def write_gguf(folder: Path, path: Path) -> Path:
    """``path``, with what ``folder`` holds; the same folder gives the same bytes."""
    from safetensors.numpy import load_file
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder).to_dict()  # the file has no defaults
    tensors = {
        _name(name): array for name, array in load_file(folder / "model.safetensors").items()
    }
    keys = {**_architecture(config), **_tokenizer(folder, config["vocab_size"])}
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)))
        for key, (kind, value) in keys.items():
            file.write(_string(key) + struct.pack("<I", kind) + _value(kind, value))
        offset = 0
        for name, array in sorted(tensors.items()):
            shape = array.shape[::-1]
            file.write(_string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
            file.write(struct.pack("<IQ", 0, offset))  # 0: float32
            offset += _padded(array.size * 4)
        file.write(b"\0" * (_padded(file.tell()) - file.tell()))
        for _, array in sorted(tensors.items()):
            content = array.astype("<f4").tobytes()
            file.write(content.ljust(_padded(len(content)), b"\0"))
    return path


def _name(name: str) -> str:
    """llama.cpp's name for a tensor of transformers'."""
    stem, _, kind = name.rpartition(".")
    if stem in OUTER:
        return f"{OUTER[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{LAYER[part]}.{kind}"


def _architecture(config: Mapping[str, Any]) -> dict[str, tuple[int, Any]]:
    rope = config.get("rope_parameters") or config
    numbers = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
    }
    return {
        "general.architecture": (STRING, "qwen2"),
        "general.name": (STRING, "random"),
        **{f"qwen2.{name}": (UINT32, number) for name, number in numbers.items()},
        "qwen2.rope.freq_base": (FLOAT32, rope["rope_theta"]),
        "qwen2.attention.layer_norm_rms_epsilon": (FLOAT32, config["rms_norm_eps"]),
    }


def _tokenizer(folder: Path, size: int) -> dict[str, tuple[int, Any]]:
    found = json.loads((folder / "tokenizer.json").read_text())
    special = {token["content"]: token["id"] for token in found["added_tokens"]}
    tokens = [f"[PAD{number}]" for number in range(size)]
    kinds = [UNUSED] * size
    for token, number in found["model"]["vocab"].items():
        tokens[number], kinds[number] = token, NORMAL
    for token, number in special.items():
        tokens[number], kinds[number] = token, CONTROL
    merges = [
        pair if isinstance(pair, str) else " ".join(pair) for pair in found["model"]["merges"]
    ]
    return {
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.pre": (STRING, "qwen2"),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, tokens)),
        "tokenizer.ggml.token_type": (ARRAY, (INT32, kinds)),
        "tokenizer.ggml.merges": (ARRAY, (STRING, merges)),
        "tokenizer.ggml.eos_token_id": (UINT32, special["<|im_end|>"]),
        "tokenizer.ggml.bos_token_id": (UINT32, special["<|endoftext|>"]),
        "tokenizer.ggml.add_bos_token": (BOOL, False),
        "tokenizer.chat_template": (STRING, (folder / "chat_template.jinja").read_text()),
    }


def _value(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _string(value)
    if kind == ARRAY:
        of, values = value
        return struct.pack("<IQ", of, len(values)) + b"".join(_value(of, one) for one in values)
    return struct.pack({UINT32: "<I", INT32: "<i", FLOAT32: "<f", BOOL: "<?"}[kind], value)


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
