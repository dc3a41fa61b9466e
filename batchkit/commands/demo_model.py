"""Builds a tiny real model: Qwen3-VL's architecture with random weights.

The folder is laid out as on the Hugging Face hub, so vLLM and transformers load it like any other.
Its answers are words without meaning, but they depend on every prompt and image, are never empty,
and under greedy decoding are always the same.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchkit.engines.registry import require
from batchkit.errors import JobError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor

MARKER = "batchkit_demo_model.json"  # a folder that holds it may be replaced
DTYPES = ("float32", "bfloat16", "float16")
PACKAGES = ("torch", "transformers", "safetensors", "tokenizers")

HIDDEN, LAYERS, KV_HEADS, HEAD_DIM, MLP = 64, 2, 1, 32, 96  # vLLM on CPUs requires HEAD_DIM ≥ 32
VISION_HIDDEN, VISION_DEPTH, VISION_MLP, PATCH, MERGE, POSITIONS = 16, 2, 32, 16, 2, 256
ATTENTION_STD = 5.0  # of the scores before their softmax
LOGIT_STD = 4.0

SPECIAL_TOKENS = (  # Qwen's, in Qwen's order
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

# The tokenizer is trained on this text, and its words are what the model says.
SAMPLE_TEXT = """
 the old baker opens his shop before the sun is up and counts what was sold in the north and in
 the south of the town. each quarter he writes a table with one row for bread and one for cake, a
 column for every month, and a total at the end. in spring the river rises, in summer the garden
 is full of birds, in autumn the leaves fall, and in winter the lake is white with snow. a child
 reads a letter from her friend near the harbour and asks how many boats came home. the answer
 is yes, no, or a number that nobody can know. some years are better than other years, most are
 about average, and a few are far lower or higher than the rest. if you compare the first value
 with the last, then the share of green tea grows while coffee stays the same. the school bus
 takes nine children over the bridge to the library, where they borrow books on stone, wood,
 glass, music and stars. rain on the roof, wind in the trees, a quiet road between two hills: so
 the day goes by, and the night market closes late. what is not in the picture has no colour,
 no weight and no price, but it may still be part of the story that we tell.
"""

# Qwen's own pattern, with the sample's words and single digits as pieces.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Qwen3-VL's chat format without its tool calls. From it, vLLM sees that content may be a list.
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for content in message.content %}
            {%- if content.type == 'image' or 'image' in content or 'image_url' in content %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif content.type == 'video' or 'video' in content %}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' }}
            {%- elif 'text' in content %}
                {{- content.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

README = """\
# A demo model of batchkit

The architecture is {architecture}; the weights are random numbers (seed {seed}, {dtype}).
**Its answers mean nothing.** It exists to try batchkit, and to test it, without a download: it
loads and runs in vLLM as a real model does. `batchkit demo-model PATH` builds it again, byte for
byte. Do not judge speed, memory or quality by it. The model `batchkit-demo`, which comes with batchkit,
reads tables.
"""


def build_demo_model(
    path: Path, *, text_only: bool = False, seed: int = 0, dtype: str = "float32"
) -> None:
    """Write the model to the folder ``path``: Qwen3-VL, or Qwen2 when ``text_only``.

    The same arguments give the same bytes. The folder appears only when it is complete; an
    older demo model there is replaced.

    Raises:
        JobError: ``path`` holds something else, can't be written, ``dtype`` is unknown, or a package
            is missing.
    """
    if dtype not in DTYPES:
        raise JobError(f"dtype {dtype!r}: a demo model has one of {', '.join(DTYPES)}")
    require(PACKAGES, user="a demo model", extra="transformers")
    path = path.resolve()
    try:
        _refuse_foreign(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that the move into place stays on one file system.
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as scratch:
            new, old = Path(scratch, "new"), Path(scratch, "old")
            new.mkdir()
            _write_files(new, text_only, seed, dtype)
            _refuse_foreign(path)
            if path.exists():
                path.rename(old)
            new.rename(path)
    except OSError as error:
        raise JobError(f"{path}: can't be written: {error}") from error


def _refuse_foreign(path: Path) -> None:
    if path.is_dir() and ((path / MARKER).is_file() or not any(path.iterdir())):
        return
    if path.exists():
        raise JobError(
            f"{path}: is there already and is not a demo model; name a new or empty folder,"
            " or remove it yourself"
        )


def _write_files(folder: Path, text_only: bool, seed: int, dtype: str) -> None:
    import torch
    from safetensors.torch import save

    tokenizer = _tokenizer()
    config = _config(tokenizer, text_only, dtype)
    architecture = config["architectures"][0]
    stops = [_id(tokenizer, "<|im_end|>"), _id(tokenizer, "<|endoftext|>")]
    text_files = {
        "README.md": README.format(architecture=architecture, seed=seed, dtype=dtype),
        "chat_template.jinja": CHAT_TEMPLATE,
        "tokenizer.json": tokenizer.to_str(),
    }
    json_files: dict[str, Any] = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": stops, "pad_token_id": stops[1]},
        "tokenizer_config.json": tokenizer_config(config.get("text_config", config)),
        MARKER: {"architecture": architecture, "seed": seed, "dtype": dtype},
    }
    if not text_only:
        json_files["preprocessor_config.json"] = _pixels(
            2**16, 1605632, image_processor_type="Qwen2VLImageProcessorFast"
        )
        json_files["video_preprocessor_config.json"] = _pixels(
            2**12, 2**21, video_processor_type="Qwen3VLVideoProcessor"
        )
    for name, text in text_files.items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")
    for name, content in json_files.items():
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (folder / name).write_text(text, encoding="utf-8", newline="\n")
    weights = _weights(config, tokenizer, seed)
    weights = {name: tensor.to(getattr(torch, dtype)) for name, tensor in weights.items()}
    # Not save_file or save_pretrained: a full disk must raise OSError, and anybody may read the file.
    (folder / "model.safetensors").write_bytes(save(weights, {"format": "pt"}))


def tokenizer_config(text: Mapping[str, Any]) -> dict[str, Any]:
    """Of Qwen's tokenizer with our special tokens; ``text`` is the config of the language model."""
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": SPECIAL_TOKENS[1:],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": text["max_position_embeddings"],
    }


def _tokenizer() -> Tokenizer:
    """Byte-level BPE in which every word of the sample is one token, special tokens last."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
    from tokenizers import pre_tokenizers as pre
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre.Sequence(
        [
            pre.Split(Regex(PIECES), behavior="isolated"),
            pre.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=2000,  # more than the sample needs, so every word is merged fully
        min_frequency=1,
        initial_alphabet=pre.ByteLevel.alphabet(),
        show_progress=False,
    )
    # A space before every word, as in the model's answers.
    tokenizer.train_from_iterator([f" {' '.join(SAMPLE_TEXT.split())}"], trainer)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return tokenizer


def _id(tokenizer: Tokenizer, token: str) -> int:
    number = tokenizer.token_to_id(token)
    assert number is not None, token
    return number


def _config(tokenizer: Tokenizer, text_only: bool, dtype: str) -> dict[str, Any]:
    """``config.json`` as in the hub's Qwen2 and Qwen3-VL folders, without the classes' defaults."""
    text = {
        "dtype": dtype,
        "vocab_size": _vocab_size(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": _heads(text_only),
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 32768,
        "bos_token_id": _id(tokenizer, "<|endoftext|>"),
        "eos_token_id": _id(tokenizer, "<|im_end|>"),
    }
    if text_only:
        return {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
            **text,
        }
    rope = {"rope_type": "default", "mrope_section": [8, 4, 4], "mrope_interleaved": True}
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "dtype": dtype,
        "tie_word_embeddings": False,
        "image_token_id": _id(tokenizer, "<|image_pad|>"),
        "video_token_id": _id(tokenizer, "<|video_pad|>"),
        "vision_start_token_id": _id(tokenizer, "<|vision_start|>"),
        "vision_end_token_id": _id(tokenizer, "<|vision_end|>"),
        "text_config": {
            "model_type": "qwen3_vl_text",
            "head_dim": HEAD_DIM,
            "rope_theta": 5e6,
            "rope_scaling": rope,
            **text,
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "depth": VISION_DEPTH,
            "hidden_size": VISION_HIDDEN,
            "intermediate_size": VISION_MLP,
            "num_heads": 1,
            "patch_size": PATCH,
            "temporal_patch_size": 2,
            "spatial_merge_size": MERGE,
            "out_hidden_size": HIDDEN,
            "num_position_embeddings": POSITIONS,
            "deepstack_visual_indexes": [0],
        },
    }


def _heads(text_only: bool) -> int:
    """Four see more of a prompt than two, but in Qwen2 all heads together fill ``HIDDEN``."""
    return HIDDEN // HEAD_DIM if text_only else 4


def _vocab_size(tokenizer: Tokenizer) -> int:
    return math.ceil(tokenizer.get_vocab_size() / 64) * 64


def _pixels(shortest_edge: int, longest_edge: int, **kind: str) -> dict[str, Any]:
    """A processor's config; Qwen calls these pixel counts edges."""
    return {
        "size": {"shortest_edge": shortest_edge, "longest_edge": longest_edge},
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
        **kind,
    }


# Attention must be sharp to distinguish prompts: flat attention averages them all alike.
SHARP = math.sqrt(ATTENTION_STD)
# By a pattern in a matrix's name: the standard deviation of its outputs, if not 1.
GAINS = {
    "embed_tokens": math.sqrt(HIDDEN),
    "lm_head": LOGIT_STD,
    r"\.[qk]_proj": SHARP,
    r"\.(v|down)_proj": 2.0,
    "patch_embed": 4.0,
    "pos_embed": 0.5 * math.sqrt(VISION_HIDDEN),
    r"\.qkv": 1.5,
    "merger.*linear": 2.0,
}


def _weights(config: dict[str, Any], tokenizer: Tokenizer, seed: int) -> dict[str, Tensor]:
    """Uniform, not normal: simple arithmetic on the generator's bits, so equal on all machines."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    kind = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    weights: dict[str, Tensor] = kind.from_config(AutoConfig.for_model(**config)).state_dict()
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(weights, key=_order):
        std, mean = _distribution(name, weights[name])
        drawn = torch.rand(weights[name].shape, generator=generator)
        weights[name] = (drawn * 2 - 1) * (math.sqrt(3) * std) + mean
    head = weights["lm_head.weight"]
    head *= torch.tensor(_word_gains(tokenizer, len(head)))[:, None]
    return weights


def _order(name: str) -> tuple[int, int, int]:
    """Of drawing; another order gives other weights. The vision part's is the model's own."""
    layer = re.search(r"\.layers\.(\d+)\.", name)
    rank = 0 if "layernorm" in name else 2 if name.endswith(("_norm.weight", ".bias")) else 1
    return (1, 0, 0) if "visual" in name else (0, int(layer[1]) + 1 if layer else 0, rank)


def _distribution(name: str, tensor: Tensor) -> tuple[float, float]:
    """Standard deviation and mean."""
    if name.endswith("bias"):
        return 0.0 if "norm" in name else 0.1, 0.0
    if "norm" in name:
        return 0.0, SHARP if re.search("[qk]_norm", name) else 1.0
    gain = next((gain for pattern, gain in GAINS.items() if re.search(pattern, name)), 1.0)
    return gain / math.sqrt(tensor[0].numel()), 0.0


def _word_gains(tokenizer: Tokenizer, vocab_size: int) -> list[float]:
    """Factors on each token's output weights: words get the largest.

    Other ASCII pieces get less, for when a grammar allows nothing else. Special tokens and single
    bytes of longer characters get 0, so that no answer is empty or undecodable.
    """
    gains = [0.0] * vocab_size
    words = {f"Ġ{word}" for word in re.findall("[a-z]+", SAMPLE_TEXT)} | {",", "."}
    for token, number in tokenizer.get_vocab().items():
        if token in words:
            gains[number] = 1.0
        elif re.fullmatch("Ġ?[!-~]*", token) and token not in SPECIAL_TOKENS:
            gains[number] = 0.25
    return gains
