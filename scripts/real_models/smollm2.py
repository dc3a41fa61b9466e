"""Converts SmolLM2's GGUF to a folder of safetensors: smollm2.py GGUF OUT

The quantized weights (Q4_1) become float32, so vLLM, transformers and llama.cpp work on the same values.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

CONTEXT = 8192  # tokens that the model was trained for
BEGIN, END = 1, 2  # ids of <|im_start|> and <|im_end|>


def convert(gguf: Path, out: Path) -> None:
    read = {"gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **read)
    # transformers refuses to save a model that it read from GGUF, so the weights go into a plain one.
    left_out = ("quantization_config", "_name_or_path", "dtype")
    config = {k: v for k, v in loaded.config.to_dict().items() if k not in left_out}
    model = LlamaForCausalLM(LlamaConfig(**{**config, "architectures": ["LlamaForCausalLM"]}))
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=BEGIN, eos_token_id=END, pad_token_id=END
    )
    model.save_pretrained(out)

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **read)
    # GGUF does not say how SmolLM2 splits text: digits one by one, then as GPT-2 does.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    tokenizer.model_max_length = CONTEXT
    tokenizer.save_pretrained(out)
    _edit(out / "config.json", drop=("_model_name_or_path",))
    _edit(
        out / "tokenizer_config.json",
        drop=("is_local", "local_files_only", "backend"),
        tokenizer_class="PreTrainedTokenizerFast",
    )


def _edit(path: Path, drop: tuple[str, ...], **values: str) -> None:
    table = json.loads(path.read_text())
    kept = {key: value for key, value in table.items() if key not in drop}
    path.write_text(json.dumps(kept | values, indent=2))


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
