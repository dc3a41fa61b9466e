"""A task and a model for n-gram speculation: the answer copies a text of the prompt, word for word.

The model has the size and the cost of its shape, but its layers add nothing, so that the next token
depends on the last one alone: after a word comes the next word of the vocabulary, after the last word the
answer ends, and after any other token comes the first word. A row's text is these words in this order.
"""

from __future__ import annotations

import json
from pathlib import Path

import shapes
from models import FIRST_WORD, WORDS


def build_copying_model(path: Path, shape: shapes.Shape) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shapes.build_shape(path, {**shape, "tie_word_embeddings": False}, text_only=True)
    config = AutoConfig.from_pretrained(path)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    words = slice(FIRST_WORD, FIRST_WORD + WORDS)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        tokens, head = model.model.embed_tokens.weight, model.lm_head.weight
        its = torch.randn(WORDS + 1, config.hidden_size).to(tokens.dtype)
        tokens[:] = its[-1]
        tokens[words] = its[:-1]
        head.zero_()
        head[FIRST_WORD] = its[-1]
        head[FIRST_WORD + 1 : FIRST_WORD + WORDS] = its[: WORDS - 1]
        head[config.eos_token_id] = its[WORDS - 1]
    model.save_pretrained(path)
    return path


def write(path: Path, n: int, model: Path) -> Path:
    from tokenizers import Tokenizer

    copied = Tokenizer.from_file(str(model / "tokenizer.json")).decode(
        range(FIRST_WORD, FIRST_WORD + WORDS)
    )
    with path.open("w") as rows:
        for i in range(n):
            rows.write(json.dumps({"q": f"{i}: copy this text.\n{copied.strip()}"}) + "\n")
    return path
