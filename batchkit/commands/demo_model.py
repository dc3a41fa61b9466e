"""A tiny model with random weights and Qwen3-VL's architecture, for tests and first steps.

The folder is laid out as on the Hugging Face hub, so vLLM and transformers load it like any other. Its answers are
words without meaning, but they are never empty and depend on every prompt and image. With greedy decoding they are
always the same.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchkit.engines.registry import require
from batchkit.errors import JobError

if TYPE_CHECKING:
    from torch import Tensor

MARKER = "batchkit_demo_model.json"  # a folder that holds it may be replaced
PACKAGES = ("torch", "transformers", "safetensors", "tokenizers")  # transformers imports the last
FILES = files("batchkit") / "random_model"

HIDDEN, VISION_HIDDEN = 64, 16
ATTENTION_STD = 5.0  # standard deviation of the attention scores before the softmax
LOGIT_STD = 4.0

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


def build_demo_model(path: Path, *, text_only: bool = False) -> None:
    """Write the model to the folder ``path``: Qwen3-VL, or with ``text_only`` Qwen2.

    The files are identical each time. The folder appears only when it is complete; an older demo model there is
    replaced.

    Raises:
        JobError: ``path`` holds something else, can't be written, or a package is missing.
    """
    require(PACKAGES, user="a demo model", extra="transformers")
    path = path.resolve()
    try:
        _refuse_foreign(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder as the target, so that the final rename stays on one file system.
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as scratch:
            new, old = Path(scratch, "new"), Path(scratch, "old")
            new.mkdir()
            _write_files(new, text_only)
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
            f"{path}: exists already and is not a demo model; give a new or empty folder, or remove this one yourself"
        )


def _write_files(folder: Path, text_only: bool) -> None:
    from safetensors.torch import save

    texts = {file.name: file.read_text(encoding="utf-8") for file in FILES.iterdir()}
    of_text = texts.pop("text_only.json")
    if text_only:
        texts = {name: text for name, text in texts.items() if "preprocessor" not in name}
        texts["config.json"] = of_text
    config = json.loads(texts["config.json"])
    about = {"architecture": config["architectures"][0]}
    texts["README.md"] = texts["README.md"].format(**about)
    texts[MARKER] = json.dumps(about, indent=2) + "\n"
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")
    weights = _weights(config, json.loads(texts["tokenizer.json"]))
    # save_file and save_pretrained are not used: a full disk must raise OSError, and other users must be able to read
    # the file.
    (folder / "model.safetensors").write_bytes(save(weights, {"format": "pt"}))


# Attention must be sharp to distinguish prompts: flat attention averages them all alike.
SHARP = math.sqrt(ATTENTION_STD)
# The standard deviation of a matrix's outputs, by a pattern in the matrix's name. It is 1 for all other matrices.
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


def _weights(config: dict[str, Any], tokenizer: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return random weights by name. They are made by simple arithmetic from the generator's bits, so that all machines
    get the same numbers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    kind = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    weights: dict[str, Tensor] = kind.from_config(AutoConfig.for_model(**config)).state_dict()
    generator = torch.Generator().manual_seed(0)
    for name in sorted(weights, key=_order):
        std, mean = _distribution(name, weights[name])
        drawn = torch.rand(weights[name].shape, generator=generator)
        weights[name] = (drawn * 2 - 1) * (math.sqrt(3) * std) + mean
    head = weights["lm_head.weight"]
    head *= torch.tensor(_word_gains(tokenizer, len(head)))[:, None]
    return weights


def _order(name: str) -> tuple[int, int, int]:
    """Return a sort key for the weight ``name``. Weights are drawn in this order, because another order gives other
    numbers."""
    layer = re.search(r"\.layers\.(\d+)\.", name)
    rank = 0 if "layernorm" in name else 2 if name.endswith(("_norm.weight", ".bias")) else 1
    return (1, 0, 0) if "visual" in name else (0, int(layer[1]) + 1 if layer else 0, rank)


def _distribution(name: str, tensor: Tensor) -> tuple[float, float]:
    """Return the standard deviation and the mean of the distribution from which a weight is drawn."""
    if name.endswith("bias"):
        return 0.0 if "norm" in name else 0.1, 0.0
    if "norm" in name:
        return 0.0, SHARP if re.search("[qk]_norm", name) else 1.0
    gain = next((gain for pattern, gain in GAINS.items() if re.search(pattern, name)), 1.0)
    return gain / math.sqrt(tensor[0].numel()), 0.0


def _word_gains(tokenizer: Mapping[str, Any], vocab_size: int) -> list[float]:
    """Return the factor for each token's output weights. The factors decide which tokens the model says: mostly words.
    Other ASCII tokens get a smaller factor, because a grammar may allow nothing else. Special tokens and single bytes
    of longer characters get 0, so that no answer is empty or undecodable."""
    gains = [0.0] * vocab_size
    words = {f"Ġ{word}" for word in re.findall("[a-z]+", SAMPLE_TEXT)} | {",", "."}
    for token, number in tokenizer["model"]["vocab"].items():
        if token in words:
            gains[number] = 1.0
        elif re.fullmatch("Ġ?[!-~]*", token):
            gains[number] = 0.25
    return gains
