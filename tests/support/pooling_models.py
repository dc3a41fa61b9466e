"""Tiny pooling models with random weights, built on the spot: Qwen3's architecture."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

LABELS = ("bad", "fair", "good")
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def build_embedding_model(folder: Path, text_model: Path) -> Path:
    """Vectors of 64 numbers, which may be cut (Matryoshka). ``text_model`` has the tokenizer."""
    return _build(folder, text_model, "Qwen3ForCausalLM", is_matryoshka=True)


def build_classifier(
    folder: Path, text_model: Path, labels: tuple[str, ...] | None = LABELS
) -> Path:
    """Classes called ``labels``, or two without names; with one, it scores pairs."""
    names = {"num_labels": 2} if labels is None else _names(labels)
    return _build(folder, text_model, "Qwen3ForSequenceClassification", **names)


def _build(folder: Path, text_model: Path, architecture: str, **config: Any) -> Path:
    import torch
    import transformers

    made = transformers.Qwen3Config(
        vocab_size=json.loads((text_model / "config.json").read_text())["vocab_size"],
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.2,  # so that different texts get clearly different answers
        tie_word_embeddings=True,
        pad_token_id=0,
        architectures=[architecture],
        dtype="float32",
        **config,
    )
    torch.manual_seed(7)
    getattr(transformers, architecture)(made).save_pretrained(folder)
    for name in _TOKENIZER:
        shutil.copy(text_model / name, folder / name)
    return folder


def build_token_classifier(folder: Path, labels: tuple[str, ...]) -> Path:
    """BERT's architecture; its tokenizer ignores case, and splits words into letters."""
    import torch
    import transformers
    from tokenizers import BertWordPieceTokenizer

    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep")}
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    pieces = [*special.values(), *letters, *(f"##{letter}" for letter in letters), "ada", "tea"]
    tokenizer = BertWordPieceTokenizer({piece: n for n, piece in enumerate(pieces)})
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_file = str(folder / "tokenizer.json")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=tokenizer_file, **special)
    fast.save_pretrained(folder)
    made = transformers.BertConfig(
        vocab_size=len(pieces),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.2,
        architectures=["BertForTokenClassification"],
        dtype="float32",
        **_names(labels),
    )
    torch.manual_seed(7)
    transformers.BertForTokenClassification(made).save_pretrained(folder)
    return folder


def _names(labels: tuple[str, ...]) -> dict[str, Any]:
    return {
        "id2label": dict(enumerate(labels)),
        "label2id": {label: n for n, label in enumerate(labels)},
    }
