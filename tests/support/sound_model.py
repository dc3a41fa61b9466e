"""Tiny models that hear, with random weights: Qwen2-Audio's architecture, with the tokenizer of the demo model, and
Whisper's, whose tokens are bytes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from filelock import FileLock

PLACE = "<|audio_bos|><|AUDIO|><|audio_eos|>"


TRANSCRIBE = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"


def sound_model(kind: str, demo_model: Path) -> Path:
    """ "qwen2-audio" or "whisper", made once for all processes of the tests."""
    folder = Path(tempfile.gettempdir()) / kind
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "done").exists():
            command = [sys.executable, "-m", __name__, kind, str(demo_model), str(folder)]
            subprocess.run(command, check=True, capture_output=True)
            (folder / "done").touch()
    return folder


def qwen2_audio(demo_model: Path, folder: Path) -> None:
    import torch
    from safetensors.torch import load_file, save
    from transformers import (
        AutoTokenizer,
        Qwen2AudioConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2AudioProcessor,
        WhisperFeatureExtractor,
    )

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    marks = ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tower = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2}
    text = {"model_type": "qwen2", "hidden_size": 64}
    heads = {
        "intermediate_size": 96,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 2,
    }
    config = Qwen2AudioConfig(
        audio_config={**tower, "encoder_ffn_dim": 64, "num_mel_bins": 16},
        text_config={**text, **heads, "vocab_size": 704, "max_position_embeddings": 4096},
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )
    torch.manual_seed(0)
    model = Qwen2AudioForConditionalGeneration(config)
    for matrix in (its for its in model.parameters() if its.ndim > 1):
        torch.nn.init.normal_(matrix, std=1.5 / matrix[0].numel() ** 0.5)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    # As on the hub; this transformers writes one "model." too many.
    weights = {
        name.replace("model.model.model.", "model.model."): its
        for name, its in load_file(file).items()
    }
    file.write_bytes(save(weights, {"format": "pt"}))
    template = tokenizer.chat_template.replace(
        "{%- elif 'text' in content %}",
        "{%- elif content.type == 'audio' %}{{- '" + PLACE + "' }}{%- elif 'text' in content %}",
    )
    tokenizer.chat_template = template
    extractor = WhisperFeatureExtractor(feature_size=16)
    Qwen2AudioProcessor(extractor, tokenizer, chat_template=template).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def whisper(_: Path, folder: Path) -> None:
    import torch
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import (
        GenerationConfig,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperProcessor,
        WhisperTokenizer,
    )

    marks = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>"]
    marks += ["<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>"]
    marks += ["<|notimestamps|>", *(f"<|{n / 50:.2f}|>" for n in range(1501))]
    letters = {letter: n for n, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = WhisperTokenizer(vocab=letters, merges=[], additional_special_tokens=marks)
    end, start = tokenizer.convert_tokens_to_ids(marks[:2])
    ends = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    layers = {"encoder_layers": 2, "decoder_layers": 2, "d_model": 64}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes = {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    config = WhisperConfig(**layers, **heads, **sizes, **ends, decoder_start_token_id=start)
    model = WhisperForConditionalGeneration(config)
    for matrix in (its for its in model.parameters() if its.ndim > 1):
        torch.nn.init.normal_(matrix, std=1.5 / matrix[0].numel() ** 0.5)
    with torch.no_grad():  # it says letters, and never nothing
        model.model.decoder.embed_tokens.weight[len(letters) :] *= 0.2
    model.generation_config = GenerationConfig(**ends, decoder_start_token_id=start)
    model.save_pretrained(folder)
    WhisperProcessor(WhisperFeatureExtractor(), tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    make = {"qwen2-audio": qwen2_audio, "whisper": whisper}[sys.argv[1]]
    make(Path(sys.argv[2]), Path(sys.argv[3]))
