"""Tiny models that hear, with random weights: Qwen2-Audio's architecture, with the tokenizer of the demo model,
Whisper's, whose tokens are bytes, and Qwen3-Omni's and Qwen3-ASR's, which speak as the demo model does."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

from filelock import FileLock

from tests.support.forks import Fork

PLACE = "<|audio_bos|><|AUDIO|><|audio_eos|>"
OMNI_PLACE = "<|audio_start|><|audio_pad|><|audio_end|>"

_EARS = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2}
_EARS |= {"encoder_ffn_dim": 64, "num_mel_bins": 16}
TRANSCRIBE = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"


def sound_model(kind: str, demo_model: Path) -> Path:
    """ "qwen2-audio", "whisper", "qwen3-omni" or "qwen3-asr", made once for all processes of the tests."""
    folder = Path(tempfile.gettempdir()) / kind
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "done").exists():
            command = [sys.executable, "-m", __name__, kind, str(demo_model), str(folder)]
            with Fork(command, stdout=PIPE, stderr=STDOUT, text=True) as process:
                printed, _ = process.communicate(timeout=240)
            assert process.returncode == 0, printed
            (folder / "done").touch()
    return folder


def _random(kind: Any, config: Any) -> Any:
    import torch

    torch.manual_seed(0)
    model = kind(config)
    for matrix in (its for its in model.parameters() if its.ndim > 1):
        torch.nn.init.normal_(matrix, std=1.5 / matrix[0].numel() ** 0.5)
    return model


def qwen2_audio(demo_model: Path, folder: Path) -> None:
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
    text = {"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    config = Qwen2AudioConfig(
        audio_config=_EARS,
        text_config={**text, **heads, "vocab_size": 704, "max_position_embeddings": 4096},
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )
    model = _random(Qwen2AudioForConditionalGeneration, config)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    # As on the hub; this transformers writes one "model." too many.
    weights = {
        name.replace("model.model.model.", "model.model."): its
        for name, its in load_file(file).items()
    }
    file.write_bytes(save(weights, {"format": "pt"}))
    template = tokenizer.chat_template = _with_sound(tokenizer.chat_template, PLACE)
    extractor = WhisperFeatureExtractor(feature_size=16)
    Qwen2AudioProcessor(extractor, tokenizer, chat_template=template).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _with_sound(template: str, place: str) -> str:
    text = "{%- elif 'text' in content %}"
    return template.replace(
        text, f"{{%- elif content.type == 'audio' %}}{{{{- '{place}' }}}}{text}"
    )


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
    config = WhisperConfig(**layers, **heads, **sizes, **ends, decoder_start_token_id=start)
    model = _random(WhisperForConditionalGeneration, config)
    with torch.no_grad():  # it says letters, and never nothing
        model.model.decoder.embed_tokens.weight[len(letters) :] *= 0.2
    model.generation_config = GenerationConfig(**ends, decoder_start_token_id=start)
    model.save_pretrained(folder)
    WhisperProcessor(WhisperFeatureExtractor(), tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# Of the demo model's weights: what the Omni model calls them.
_OMNI_NAMES = (
    (r"^model\.visual\.", "visual."),
    (r"^model\.language_model\.", "model."),
    ("deepstack_merger_list", "merger_list"),
    (r"(merger.*)\.norm", r"\1.ln_q"),
    (r"(merger.*)\.linear_fc1", r"\1.mlp.0"),
    (r"(merger.*)\.linear_fc2", r"\1.mlp.2"),
)


def qwen3_omni(demo_model: Path, folder: Path) -> None:
    """But for the tower that hears and the experts, its weights are the demo model's."""
    from safetensors.torch import load_file, save
    from transformers import (
        AutoImageProcessor,
        AutoTokenizer,
        AutoVideoProcessor,
        Qwen3OmniMoeConfig,
        Qwen3OmniMoeProcessor,
        Qwen3OmniMoeThinkerConfig,
        Qwen3OmniMoeThinkerForConditionalGeneration,
        WhisperFeatureExtractor,
    )

    marks = {f"{kind}_token": f"<|{kind}_pad|>" for kind in ("image", "video", "audio")}
    for kind in ("vision", "audio"):
        marks |= {f"{kind}_bos_token": f"<|{kind}_start|>", f"{kind}_eos_token": f"<|{kind}_end|>"}
    tokenizer = AutoTokenizer.from_pretrained(demo_model, extra_special_tokens=marks)
    ids = {name: tokenizer.convert_tokens_to_ids(mark) for name, mark in marks.items()}
    known = json.loads((demo_model / "config.json").read_text())
    text, vision = known["text_config"], known["vision_config"]
    del text["model_type"], vision["model_type"]
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    thinker = Qwen3OmniMoeThinkerConfig(
        audio_config={**_EARS, "downsample_hidden_size": 8, "output_dim": text["hidden_size"]},
        # As on the hub: vLLM wants what transformers no longer knows.
        vision_config={**vision, "image_size": 256, "apply_vit_abs_pos_embed": True},
        text_config={**text, **experts, "mlp_only_layers": [0], "tie_word_embeddings": False},
        audio_start_token_id=ids["audio_bos_token"],
        vision_start_token_id=ids["vision_bos_token"],
        **{f"{kind}_token_id": ids[f"{kind}_token"] for kind in ("image", "video", "audio")},
    )
    model = _random(Qwen3OmniMoeThinkerForConditionalGeneration, thinker)
    seeing = {}
    for name, its in load_file(demo_model / "model.safetensors").items():
        for pattern, here in _OMNI_NAMES:
            name = re.sub(pattern, here, name)
        seeing[name] = its
    model.load_state_dict(seeing, strict=False)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    weights = {f"thinker.{name}": its for name, its in load_file(file).items()}
    file.write_bytes(save(weights, {"format": "pt"}))
    Qwen3OmniMoeConfig(
        thinker_config=thinker, architectures=["Qwen3OmniMoeForConditionalGeneration"]
    ).save_pretrained(folder)
    tokenizer.chat_template = _with_sound(tokenizer.chat_template, OMNI_PLACE)
    Qwen3OmniMoeProcessor(
        AutoImageProcessor.from_pretrained(demo_model),
        AutoVideoProcessor.from_pretrained(demo_model),
        WhisperFeatureExtractor(feature_size=16),
        tokenizer,
        chat_template=tokenizer.chat_template,
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def qwen3_asr(demo_model: Path, folder: Path) -> None:
    """What Qwen3-Omni's hears with, and the demo model's text part, which says ``<asr_text>`` for "nobody"."""
    from safetensors.torch import load_file, save
    from transformers import AutoTokenizer, Qwen3ASRProcessor, WhisperFeatureExtractor

    qwen3_omni(demo_model, folder)
    known = json.loads((demo_model / "config.json").read_text())["text_config"]
    thinker = json.loads((folder / "config.json").read_text())["thinker_config"]
    weights = {
        name.replace("model.language_model.", "thinker.model.").replace("lm_", "thinker.lm_"): its
        for name, its in load_file(demo_model / "model.safetensors").items()
        if "visual" not in name
    }
    heard = load_file(folder / "model.safetensors")
    weights |= {name: its for name, its in heard.items() if "audio_tower" in name}
    hears = {**thinker["audio_config"], "model_type": "qwen3_asr_audio_encoder"}
    speaks = {**known, "model_type": "qwen3_asr_text"}
    thinker = {"audio_token_id": thinker["audio_token_id"], "audio_config": hears}
    config = {
        "architectures": ["Qwen3ASRForConditionalGeneration"],
        "model_type": "qwen3_asr",
        "dtype": "float32",
        "thinker_config": {**thinker, "text_config": speaks},
    }
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens("<asr_text>")
    mark, word = tokenizer.convert_tokens_to_ids(["<asr_text>", "Ġnobody"])
    head = weights["thinker.lm_head.weight"]
    head[mark] = 1.1 * head[word]
    extractor = WhisperFeatureExtractor(feature_size=16)
    template = tokenizer.chat_template
    Qwen3ASRProcessor(extractor, tokenizer, chat_template=template).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(save(weights, {"format": "pt"}))


MAKERS = {
    "qwen2-audio": qwen2_audio,
    "whisper": whisper,
    "qwen3-omni": qwen3_omni,
    "qwen3-asr": qwen3_asr,
}


def main() -> None:
    MAKERS[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))


if __name__ == "__main__":
    main()
