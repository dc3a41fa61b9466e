"""The demo model: its tokenizer, its config, the model with the parts that only training needs, and
the writer of its folder."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from tokenizers import AddedToken, Regex, Tokenizer, decoders
from tokenizers import models as tokenizer_models
from tokenizers import pre_tokenizers as pre
from tokenizers.trainers import BpeTrainer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from batchkit.commands.demo_tables import COLUMN_WORDS, ROW_WORDS, WORDS

FILES = files("batchkit") / "random_model"  # the chat template and the like are the same
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

# Qwen's own pattern, with the sample's words and single digits as pieces.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

HIDDEN, LAYERS, MLP = 160, 5, 288
VISION_HIDDEN, VISION_LAYERS, VISION_MLP = 128, 6, 256
POSITIONS = 16  # learned ones of the vision part, along each side of a picture
POINTING_LAYER = 2  # its first heads are trained to attend to the cells that a question is about
HEAD_DIM = 32  # the least that vLLM's attention on CPUs takes
PATCH, MERGE = 8, 2
SIDE = PATCH * MERGE  # of a visual token, in pixels
MAX_SEEN = 512  # visual tokens; larger pictures are scaled down

# What is read in a cell: its row's name, its column's, a digit at each place, or nothing, and the
# numbers of its row and its column.
NOTHING = "<|vision_pad|>"
READ_ROWS = [NOTHING, *(f"Ġ{word}" for word in ROW_WORDS)]
READ_COLUMNS = [NOTHING, *(f"Ġ{word}" for word in COLUMN_WORDS)]
READ_DIGITS, PLACES = [*"0123456789", NOTHING], 4
READERS = 2 + PLACES + 2
LETTERS, LETTERS_LAYER = (
    string.ascii_letters + string.digits,
    2,
)  # after which a patch shows its letter


def make_tokenizer() -> Tokenizer:
    """Return a byte-level BPE tokenizer. A known word is one token, a digit is one token, and any
    other text becomes bytes."""
    tokenizer = Tokenizer(tokenizer_models.BPE())
    split = pre.Split(Regex(PIECES), behavior="isolated")
    tokenizer.pre_tokenizer = pre.Sequence(
        [split, pre.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=4000,  # more than the words need, so every one is merged fully
        min_frequency=1,
        initial_alphabet=pre.ByteLevel.alphabet(),
        show_progress=False,
    )
    known = [*WORDS, "user", "assistant", "system"]
    tokenizer.train_from_iterator([*known, *(f" {word}" for word in known)], trainer)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return tokenizer


def make_config(tokenizer: Tokenizer) -> dict[str, Any]:
    token = {name: tokenizer.token_to_id(name) for name in SPECIAL_TOKENS}
    text = {
        "model_type": "qwen3_vl_text",
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
        "vocab_size": -(-tokenizer.get_vocab_size() // 64) * 64,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HIDDEN // HEAD_DIM,
        "num_key_value_heads": HIDDEN // HEAD_DIM,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 32768,
        "bos_token_id": token["<|endoftext|>"],
        "eos_token_id": token["<|im_end|>"],
        "initializer_range": 0.05,
        # Small, so that neighbours in a picture are far apart in angle.
        "rope_theta": 1000.0,
        "rope_scaling": {
            "rope_type": "default",
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "model_type": "qwen3_vl",
        "depth": VISION_LAYERS,
        "hidden_size": VISION_HIDDEN,
        "intermediate_size": VISION_MLP,
        "num_heads": VISION_HIDDEN // HEAD_DIM,
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "spatial_merge_size": MERGE,
        "out_hidden_size": HIDDEN,
        "num_position_embeddings": POSITIONS**2,
        "deepstack_visual_indexes": [],
        "initializer_range": 0.05,
    }
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
        "image_token_id": token["<|image_pad|>"],
        "video_token_id": token["<|video_pad|>"],
        "vision_start_token_id": token["<|vision_start|>"],
        "vision_end_token_id": token["<|vision_end|>"],
        "text_config": text,
        "vision_config": vision,
    }


class GreyPatches(nn.Module):
    """The patch embedding for pictures whose six planes (colours × frames) are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(PATCH * PATCH, VISION_HIDDEN)

    def forward(self, patches: Tensor) -> Tensor:
        return self.linear(patches)


class DemoReader(nn.Module):
    """The demo model (Qwen3-VL) with readers, which only its training uses.

    A reader maps a visual token to an embedding of the text part: that of the row's name, the
    column's name, or a digit of the number in the cell. Another one maps a patch to its letter.
    With these, the vision part learns to read, and to assign names to cells, before it is trained
    on answers, and a word in a question has the same embedding as this word in the picture.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**make_config(tokenizer))).float()
        self.visual, self.text = model.model.visual, model.model.language_model
        self.visual.patch_embed = GreyPatches()
        self.letters = nn.Linear(VISION_HIDDEN, len(LETTERS))
        self.vision_layer, self.text_layer = _vision_layer, _text_layer
        self.readers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(READERS))
        vocabularies = [READ_ROWS, READ_COLUMNS, *[READ_DIGITS] * (PLACES + 2)]
        for number, words in enumerate(vocabularies):
            tokens = torch.tensor(list(map(tokenizer.token_to_id, words)))
            self.register_buffer(f"readable{number}", tokens, persistent=False)
        with torch.no_grad():
            for layer in self.text.layers:  # at first it adds little: words stay themselves
                layer.self_attn.o_proj.weight *= 0.2
                layer.mlp.down_proj.weight *= 0.2
                layer.self_attn.q_norm.weight *= 1.5
                layer.self_attn.k_norm.weight *= 1.5
            for word in WORDS:  # with a space before it and without, a word begins as the same
                first, second = (tokenizer.token_to_id(token) for token in (word, f"Ġ{word}"))
                self.embeddings[first] = self.embeddings[second]

    @property
    def embeddings(self) -> Tensor:
        return self.text.embed_tokens.weight

    def compile_layers(self) -> None:
        """Compile the layers. This makes training on a GPU faster, after half a minute for
        compiling."""
        self.vision_layer = torch.compile(_vision_layer, dynamic=True)
        self.text_layer = torch.compile(_text_layer, dynamic=True)

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Use the layers without compilation inside the block, for single pictures, each of which
        would be compiled again."""
        layers = self.vision_layer, self.text_layer
        self.vision_layer, self.text_layer = _vision_layer, _text_layer
        yield
        self.vision_layer, self.text_layer = layers

    def read(self, seen: Tensor) -> list[Tensor]:
        """Return the logits of each visual token: of the row's name, the column's name, the digits
        of the number, and the position."""
        seen = F.rms_norm(seen, seen.shape[-1:])  # as the text part's layers do
        return [
            reader(seen) @ self.embeddings[getattr(self, f"readable{number}")].T
            for number, reader in enumerate(self.readers)
        ]

    def see(self, patches: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Return the hidden states of pictures of ``height`` × ``width`` visual tokens, with the
        shape picture, token, hidden.

        Also return the logits of each patch's letter.

        Args:
            patches: Picture, patch, pixel; the four patches of a visual token together.
        """
        visual = self.visual
        lines, columns = patch_places(height, width, patches.device)
        learned = visual.pos_embed.weight.view(1, POSITIONS, POSITIONS, -1).permute(0, 3, 1, 2)
        sides = height * MERGE, width * MERGE
        learned = F.interpolate(learned, sides, mode="bilinear", align_corners=True)[0]
        hidden = visual.patch_embed(patches) + learned[:, lines, columns].T
        letters, cos_sin = hidden, _rotation(lines, columns)
        for number, block in enumerate(visual.blocks):
            hidden = self.vision_layer(block, hidden, *cos_sin)
            letters = hidden if number == LETTERS_LAYER else letters
        seen = visual.merger(hidden.flatten(0, 1)).view(len(patches), height * width, -1)
        return seen, self.letters(F.layer_norm(letters, letters.shape[-1:]))

    def think(
        self, ids: Tensor, seen: Tensor, start: int, mask: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden states of sequences in which the visual tokens ``seen`` begin at
        ``start``.

        Also return the attention of one layer.
        """
        embedded = self.text.embed_tokens(ids)
        after = embedded[:, start + seen.shape[1] :]
        hidden = torch.cat([embedded[:, :start], seen.to(embedded.dtype), after], dim=1)
        cos, sin = self.text.rotary_emb(hidden, positions[:, None])
        for number, layer in enumerate(self.text.layers):
            if number == POINTING_LAYER:
                hidden, attended = _text_layer(layer, hidden, mask, cos, sin, _kept_attention)
            else:
                hidden, _ = self.text_layer(layer, hidden, mask, cos, sin)
        return self.text.norm(hidden), attended

    def logits(self, hidden: Tensor) -> Tensor:
        return (hidden @ self.embeddings.T).float()

    def weights(self) -> dict[str, Tensor]:
        """Return the weights in bfloat16, by their names on the hub."""
        named = {f"model.visual.{name}": w for name, w in self.visual.state_dict().items()}
        named |= {f"model.language_model.{name}": w for name, w in self.text.state_dict().items()}
        patches, convolution = (f"model.visual.patch_embed.{name}" for name in ("linear", "proj"))
        planes = named.pop(f"{patches}.weight").view(-1, 1, 1, PATCH, PATCH) / 6
        named[f"{convolution}.weight"] = planes.expand(-1, 3, 2, -1, -1)
        named[f"{convolution}.bias"] = named.pop(f"{patches}.bias")
        return {name: w.detach().to(torch.bfloat16).contiguous() for name, w in named.items()}


def patch_places(height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the line and the column of each patch, in Qwen's order."""
    lines = torch.arange(height * MERGE, device=device).view(height, 1, MERGE, 1)
    columns = torch.arange(width * MERGE, device=device).view(1, width, 1, MERGE)
    shape = height, width, MERGE, MERGE
    return lines.expand(shape).flatten(), columns.expand(shape).flatten()


def _rotation(lines: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    quarter = HEAD_DIM // 4
    rates = 10000.0 ** -(torch.arange(quarter, device=lines.device) / quarter)
    angles = torch.cat([lines[:, None] * rates, columns[:, None] * rates], dim=1).repeat(1, 2)
    return angles.cos(), angles.sin()


def _vision_layer(block: nn.Module, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply a vision layer of Qwen to pictures of one size. Shape of ``hidden``: picture, patch,
    hidden."""
    attention = block.attn
    parts = attention.qkv(block.norm1(hidden)).unflatten(-1, (3, -1, HEAD_DIM))
    query, key, value = (part.transpose(1, 2) for part in parts.unbind(2))
    query, key = (_rotated(part, cos, sin).to(value.dtype) for part in (query, key))
    mixed = F.scaled_dot_product_attention(query, key, value)
    hidden = hidden + attention.proj(mixed.transpose(1, 2).flatten(2))
    return hidden + block.mlp(block.norm2(hidden))


def _text_layer(
    layer: nn.Module,
    hidden: Tensor,
    mask: Tensor,
    cos: Tensor,
    sin: Tensor,
    attend: Callable[..., tuple[Tensor, Tensor | None]] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Apply a text layer of Qwen. With ``attend`` = ``_kept_attention``, also return the attention
    weights."""
    attention, mlp = layer.self_attn, layer.mlp
    normed = _normed(layer.input_layernorm, hidden)
    heads = (*hidden.shape[:2], -1, HEAD_DIM)
    query = _normed(attention.q_norm, attention.q_proj(normed).view(heads)).transpose(1, 2)
    key = _normed(attention.k_norm, attention.k_proj(normed).view(heads)).transpose(1, 2)
    value = attention.v_proj(normed).view(heads).transpose(1, 2)
    query, key = (
        _rotated(part, cos[:, None], sin[:, None]).to(value.dtype) for part in (query, key)
    )
    mixed, attended = (attend or _attention)(query, key, value, mask)
    hidden = hidden + attention.o_proj(mixed.transpose(1, 2).flatten(2))
    normed = _normed(layer.post_attention_layernorm, hidden)
    return hidden + mlp.down_proj(F.silu(mlp.gate_proj(normed)) * mlp.up_proj(normed)), attended


def _normed(norm: nn.Module, hidden: Tensor) -> Tensor:
    return F.rms_norm(hidden, hidden.shape[-1:], norm.weight, norm.variance_epsilon)


def _rotated(part: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = part.chunk(2, dim=-1)
    return part * cos + torch.cat([-second, first], dim=-1) * sin


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, None]:
    return F.scaled_dot_product_attention(query, key, value, mask), None


def _kept_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    scores = (query * HEAD_DIM**-0.5) @ key.transpose(2, 3)
    attended = scores.masked_fill(~mask, float("-inf")).softmax(-1, dtype=scores.dtype)
    return attended @ value, attended


def write_folder(folder: Path, tokenizer: Tokenizer, model: DemoReader) -> None:
    """Write the model's folder in the layout of the Hugging Face hub. Existing files are replaced
    one by one."""
    config = make_config(tokenizer)
    stop = [config["text_config"]["eos_token_id"], config["text_config"]["bos_token_id"]]
    files = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": stop, "pad_token_id": stop[1]},
        "tokenizer_config.json": json.loads((FILES / "tokenizer_config.json").read_text()),
        "preprocessor_config.json": _processor(image_processor_type="Qwen2VLImageProcessorFast"),
        "video_preprocessor_config.json": _processor(video_processor_type="Qwen3VLVideoProcessor"),
    }
    texts = {name: json.dumps(content, indent=2) + "\n" for name, content in files.items()}
    texts |= {
        "tokenizer.json": tokenizer.to_str(),
        "chat_template.jinja": (FILES / "chat_template.jinja").read_text(),
    }
    contents = {name: text.encode() for name, text in texts.items()}
    contents["model.safetensors"] = save(model.weights(), {"format": "pt"})
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        new = folder / f"{name}.new"
        new.write_bytes(content)
        new.replace(folder / name)


def _processor(**kind: str) -> dict[str, Any]:
    return {
        "size": {
            "shortest_edge": SIDE**2,
            "longest_edge": MAX_SEEN * SIDE**2,
        },  # pixels; Qwen calls them edges
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
        **kind,
    }
