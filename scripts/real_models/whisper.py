"""Converts a Whisper model of CTranslate2 to a folder of safetensors: whisper.py CTRANSLATE2_FOLDER OUT

CTranslate2 joins the projections of an attention into one matrix, and numbers all layers. Its tokenizer.json
lacks the timestamps.
"""

from __future__ import annotations

import json
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

TYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
MULTILINGUAL_VOCABULARY = 51865  # English-only models have one entry fewer
TIMES = 1501  # timestamps from <|0.00|> to <|30.00|>, every 0.02 s
Arrays = dict[str, "np.ndarray[Any, Any]"]
Weights = dict[str, torch.Tensor]


def arrays_in(path: Path) -> Arrays:
    """Return the arrays of CTranslate2's model.bin by name."""
    data, at = path.read_bytes(), 0

    def number(code: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from(f"<{code}", data, at)
        at += struct.calcsize(f"<{code}")
        return int(value)

    def text() -> str:
        nonlocal at
        size = number("H")
        at += size
        return data[at - size : at - 1].decode()

    number("I"), text(), number("I")  # version, specification, revision
    found: Arrays = {}
    for _ in range(number("I")):
        name, shape = text(), [number("I") for _ in range(number("B"))]
        dtype, n_bytes = np.dtype(TYPES[number("B")]), number("I")
        found[name] = np.frombuffer(data, dtype, n_bytes // dtype.itemsize, at).reshape(shape)
        at += n_bytes
    return found


class Source:
    """The arrays of a model, as float32 tensors."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays

    def tensor(self, name: str) -> torch.Tensor:
        array = self.arrays[name]
        if array.dtype == np.int8:
            return torch.tensor(array.astype(np.float32) / self.arrays[f"{name}_scale"][..., None])
        return torch.tensor(array.astype(np.float32))

    def layers(self, side: str) -> int:
        """Return the number of layers of ``side``: "encoder" or "decoder"."""
        return len({m[1] for k in self.arrays if (m := re.match(rf"{side}/layer_(\d+)/", k))})

    def linear(self, to: str, name: str) -> Weights:
        return {
            f"{to}.weight": self.tensor(f"{name}/weight"),
            f"{to}.bias": self.tensor(f"{name}/bias"),
        }

    def norm(self, to: str, name: str) -> Weights:
        return {
            f"{to}.weight": self.tensor(f"{name}/gamma"),
            f"{to}.bias": self.tensor(f"{name}/beta"),
        }

    def parts(self, to: list[str], name: str) -> Weights:
        """Return the matrices that one matrix joins. Whisper's keys have no bias."""
        weights = self.tensor(f"{name}/weight").chunk(len(to))
        biases = self.tensor(f"{name}/bias").chunk(len(to))
        found = {f"{one}.weight": weight for one, weight in zip(to, weights, strict=True)}
        with_bias = zip(to, biases, strict=True)
        return found | {f"{one}.bias": b for one, b in with_bias if not one.endswith("k_proj")}


def weights_of(source: Source) -> Weights:
    """Return all weights under the names of transformers."""
    found: Weights = {}
    for side in ("encoder", "decoder"):
        for layer in range(source.layers(side)):
            to, name = f"model.{side}.layers.{layer}", f"{side}/layer_{layer}"
            of_self = [f"{to}.self_attn.{part}_proj" for part in "qkv"]
            found |= source.parts(of_self, f"{name}/self_attention/linear_0")
            found |= source.linear(f"{to}.self_attn.out_proj", f"{name}/self_attention/linear_1")
            found |= source.norm(f"{to}.self_attn_layer_norm", f"{name}/self_attention/layer_norm")
            if side == "decoder":
                cross = f"{to}.encoder_attn"
                found |= source.parts([f"{cross}.q_proj"], f"{name}/attention/linear_0")
                keys = [f"{cross}.k_proj", f"{cross}.v_proj"]
                found |= source.parts(keys, f"{name}/attention/linear_1")
                found |= source.linear(f"{cross}.out_proj", f"{name}/attention/linear_2")
                found |= source.norm(f"{cross}_layer_norm", f"{name}/attention/layer_norm")
            found |= source.linear(f"{to}.fc1", f"{name}/ffn/linear_0")
            found |= source.linear(f"{to}.fc2", f"{name}/ffn/linear_1")
            found |= source.norm(f"{to}.final_layer_norm", f"{name}/ffn/layer_norm")
        found |= source.norm(f"model.{side}.layer_norm", f"{side}/layer_norm")
        places = source.tensor(f"{side}/position_encodings/encodings")
        found[f"model.{side}.embed_positions.weight"] = places
    for name in ("conv1", "conv2"):
        found |= source.linear(f"model.encoder.{name}", f"encoder/{name}")
    found["model.decoder.embed_tokens.weight"] = source.tensor("decoder/embeddings/weight")
    return found


def convert(folder: Path, out: Path) -> None:
    source = Source(arrays_in(folder / "model.bin"))
    settings = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    model = WhisperForConditionalGeneration(_config(source, settings, ids))
    lacks = model.load_state_dict(weights_of(source), strict=False)
    assert {*lacks.missing_keys} <= {"proj_out.weight"}, lacks  # it is tied to the embeddings
    assert not lacks.unexpected_keys, lacks
    model.tie_weights()
    model.generation_config = _generation_config(source, settings, ids)
    model.to(torch.float16).save_pretrained(out)
    WhisperFeatureExtractor(feature_size=model.config.num_mel_bins).save_pretrained(out)
    _write_tokenizer(tokenizer, ids, out)


def _vocabulary(source: Source) -> int:
    return len(source.arrays["decoder/embeddings/weight"])


def _end(source: Source) -> int:
    """Return the id of <|endoftext|>."""
    return 50257 if _vocabulary(source) >= MULTILINGUAL_VOCABULARY else 50256


def _config(source: Source, settings: dict[str, Any], ids: dict[str, int]) -> WhisperConfig:
    width, mels = source.arrays["encoder/conv1/weight"].shape[:2]
    end = _end(source)
    config = WhisperConfig(
        vocab_size=_vocabulary(source),
        num_mel_bins=mels,
        d_model=width,
        encoder_layers=source.layers("encoder"),
        decoder_layers=source.layers("decoder"),
        encoder_attention_heads=int(source.arrays["encoder/num_heads"]),
        decoder_attention_heads=int(source.arrays["decoder/num_heads"]),
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        max_source_positions=1500,
        max_target_positions=448,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=ids["<|startoftranscript|>"],
        begin_suppress_tokens=settings["suppress_ids_begin"],
    )
    config.suppress_tokens = None  # the generation config has them
    return config


def _generation_config(
    source: Source, settings: dict[str, Any], ids: dict[str, int]
) -> GenerationConfig:
    end, is_multilingual = _end(source), _vocabulary(source) >= MULTILINGUAL_VOCABULARY
    languages = {}
    if is_multilingual:
        names = {number: name for name, number in ids.items()}
        languages = {
            "lang_to_id": {names[number]: number for number in settings["lang_ids"]},
            "task_to_id": {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")},
        }
    return GenerationConfig(
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=ids["<|startoftranscript|>"],
        begin_suppress_tokens=settings["suppress_ids_begin"],
        suppress_tokens=settings["suppress_ids"],
        no_timestamps_token_id=ids["<|notimestamps|>"],
        prev_sot_token_id=ids["<|startofprev|>"],
        alignment_heads=settings["alignment_heads"],
        max_length=448,
        max_initial_timestamp_index=50,
        is_multilingual=is_multilingual,
        return_timestamps=False,
        **languages,
    )


def _write_tokenizer(tokenizer: dict[str, Any], ids: dict[str, int], out: Path) -> None:
    known = {token["id"] for token in tokenizer["added_tokens"]}
    tokenizer["added_tokens"] += [
        token for token in _timestamps(ids["<|notimestamps|>"] + 1) if token["id"] not in known
    ]
    end = "<|endoftext|>"
    config = {
        "tokenizer_class": "WhisperTokenizer",
        **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), end),
        "model_max_length": 448,
        "add_prefix_space": False,
        "processor_class": "WhisperProcessor",
        "language": None,
        "task": None,
    }
    pairs = (
        merge if isinstance(merge, str) else " ".join(merge)
        for merge in tokenizer["model"]["merges"]
    )
    (out / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    (out / "vocab.json").write_text(json.dumps(tokenizer["model"]["vocab"], ensure_ascii=False))
    (out / "merges.txt").write_text("\n".join(["#version: 0.2", *pairs, ""]))


def _timestamps(first: int) -> Iterator[dict[str, Any]]:
    for number in range(TIMES):
        text = f"<|{number * 0.02:.2f}|>"
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        yield {"id": first + number, "content": text, **flags, "special": False}


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
