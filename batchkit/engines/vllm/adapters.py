"""The LoRA adapters of ``[engine.loras]``: their files, and the vLLM options that they need.

vLLM copies a smaller matrix into the corner of a larger one. Therefore an adapter for another model may load without an
error and give wrong answers. To prevent this, this module compares the sizes of the matrices.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import orjson

from batchkit.config.regular_file import read_bytes
from batchkit.config.tables import JobConfig
from batchkit.errors import JobError
from batchkit.storage.fingerprints import ADAPTER_FILES, adapter_fingerprint

CONFIG, WEIGHTS = ADAPTER_FILES
_MOST_RANK = 512  # vLLM's limit
_MOST_SLOTS = 8
_CPU_CACHE_BYTES = 4 * 2**30
# Layers of a language model; towers for images or sound have other layers.
_LAYER = re.compile(
    r"base_model\.model\.(?:model\.|language_model\.)*layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)\.lora_([AB])\.weight"
)
# Matrix sides that have the model's hidden size in every model; other sides vary.
_HIDDEN = frozenset(
    [f"{name}_proj A" for name in ("q", "k", "v", "gate", "up")] + ["o_proj B", "down_proj B"]
)

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Adapter:
    """An adapter of ``[engine.loras]`` with its ``adapter_config.json`` and the shapes of its tensors."""

    name: str
    folder: Path
    config: Mapping[str, Any]
    shapes: Shapes

    @property
    def rank(self) -> int:
        """The highest rank of the adapter's matrices."""
        its = [shape[0] for name, shape in self.shapes.items() if name.endswith("lora_A.weight")]
        return max(int(self.config["r"]), *its)

    @property
    def n_bytes(self) -> int:
        return (self.folder / WEIGHTS).stat().st_size

    @cached_property
    def request(self) -> Any:
        """The adapter as vLLM's ``LoRARequest``.

        The request's name and number are derived from the adapter's files, because vLLM's prefix cache uses both as
        key.
        """
        from vllm.lora.request import LoRARequest

        digest = adapter_fingerprint(str(self.folder)) or ""
        return LoRARequest(digest, int(digest[:15], 16) + 1, str(self.folder))


def adapters_of(job: JobConfig) -> list[Adapter]:
    """Return the adapters of the job's engine.

    Raises:
        JobError: Adapters are missing, damaged or unsupported by vLLM; one line per adapter.
    """
    found, problems = [], []
    for name, place in job.engine.loras.items():
        try:
            found.append(_adapter_in(name, _folder_of(place)))
        except _Unusable as reason:
            problems.append(f"engine.loras.{name}: {reason}")
    try:
        _folder_of(job.engine.lora or ".")
    except _Unusable as reason:
        problems.append(f"engine.lora: {reason}")
    if problems:
        raise JobError("\n".join(problems))
    return found


def lora_options(adapters: Sequence[Adapter], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the vLLM options that ``adapters`` need. The user's options in ``given`` take precedence."""
    if not adapters:
        return {}
    highest = max(adapter.rank for adapter in adapters)
    rank = next((2**n for n in range(3, 10) if 2**n >= highest), _MOST_RANK)
    slots = given.get("max_loras", min(len(adapters), _MOST_SLOTS))
    fitting = slots if isinstance(slots, int) else 1  # vLLM refuses other types
    cached = _CPU_CACHE_BYTES // max(1, *(adapter.n_bytes for adapter in adapters))
    return {
        "max_loras": slots,
        "max_lora_rank": rank,
        "max_cpu_loras": max(fitting, min(len(adapters) + 1, cached)),  # + 1: the adapter of zeros
        **given,
        "enable_lora": True,
    }


def check_adapters(adapters: Sequence[Adapter], vllm_config: Any) -> None:
    """Raise JobError if an adapter does not fit the model, or its rank is above the limit."""
    most = vllm_config.lora_config.max_lora_rank if adapters else 0
    model = vllm_config.model_config
    config, weights = model.hf_text_config, _weights_of(model) if adapters else {}
    problems = []
    for adapter in adapters:
        place = f"engine.loras.{adapter.name}: {adapter.folder}"
        if adapter.rank > most:
            remedy = "raise max_lora_rank, or leave it out"
            problems.append(
                f"{place}: has rank {adapter.rank}, but engine.options.max_lora_rank is {most}: {remedy}"
            )
        elif (misfit := next(_misfits(adapter.shapes, config, weights), None)) is not None:
            base = adapter.config.get("base_model_name_or_path")
            problems.append(f"{place}: is for another base model ({base}): {misfit}")
    if problems:
        raise JobError("\n".join(problems))


class _Unusable(Exception):
    """The reason why an adapter can't be used."""


def _folder_of(place: str) -> Path:
    """Return the folder with the adapter's files: ``place`` if it is a folder, otherwise the download of this name on
    the hub."""
    folder = Path(place)
    if folder.is_dir():
        return folder
    if folder.is_absolute() or place.startswith(".") or place.count("/") != 1:
        raise _Unusable(
            f"{place}: no such folder, and not a name on the hub, which has the form owner/name"
        )
    return _from_hub(place)


@cache
def _from_hub(place: str) -> Path:
    """Return the folder in the hub's cache with the files of the adapter ``place``; download them if they are not
    there."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(place, allow_patterns=[*ADAPTER_FILES]))
    except Exception as error:  # the hub's client raises many types
        reason = " ".join(str(error).split())[:200]
        raise _Unusable(f"{place}: no such folder, and not found on the hub: {reason}") from error


def _adapter_in(name: str, folder: Path) -> Adapter:
    path = folder / CONFIG
    try:
        config = orjson.loads(read_bytes(path))
    except OSError as error:
        raise _Unusable(
            f"{path}: {error.strerror or error}; give the folder of an adapter"
        ) from error
    except orjson.JSONDecodeError as error:
        raise _Unusable(f"{path}: is not JSON: {error}") from error
    rank = config.get("r") if isinstance(config, dict) else None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else config
        raise _Unusable(f'{path}: peft_type is {kind!r}, expected "LORA"')
    if not isinstance(rank, int) or not 1 <= rank <= _MOST_RANK:
        raise _Unusable(f"{path}: r is {rank!r}, expected a rank from 1 to {_MOST_RANK}")
    return Adapter(name, folder, config, _shapes_in(folder / WEIGHTS))


def _shapes_in(path: Path) -> Shapes:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        is_pickle = path.with_suffix(".bin").exists()
        remedy = "; the .bin is a pickle, which is never read: save it as safetensors" * is_pickle
        raise _Unusable(f"{path}: No such file or directory{remedy}")
    try:
        with safe_open(path, "np") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise _Unusable(
            f"{path}: is damaged: {error}; copy or download the adapter again"
        ) from error
    if not shapes:
        raise _Unusable(f"{path}: has no weights; copy or download the adapter again")
    return shapes


def _weights_of(model_config: Any) -> Shapes:
    """Return the shapes of the model's weights; empty if they are not in a folder, or quantized."""
    folder, shapes = Path(model_config.model), dict[str, Sequence[int]]()
    if getattr(model_config.hf_config, "quantization_config", None) is None:
        for path in folder.glob("*.safetensors"):
            with suppress(_Unusable):
                shapes |= _shapes_in(path)
    return shapes


def _misfits(shapes: Shapes, config: Any, weights: Shapes) -> Iterator[str]:
    """Yield a text for each matrix of an adapter whose size does not fit the model.

    - ``shapes``: shapes of the adapter's tensors.
    - ``config``: the model's transformers config.
    - ``weights``: shapes of the model's weights.
    """
    for name, shape in shapes.items():
        module, _, side = name.removesuffix(".weight").rpartition(".lora_")
        weight = weights.get(f"{module.removeprefix('base_model.model.')}.weight", ())
        if len(weight) == len(shape) == 2 and side in ("A", "B"):
            size, expected = (shape[1], weight[1]) if side == "A" else (shape[0], weight[0])
            if size != expected:
                yield f"{name} has a side of {size}, but the model's weights have {expected}"
    hidden, n_layers = (getattr(config, name, 0) for name in ("hidden_size", "num_hidden_layers"))
    for name, shape in shapes.items():
        if (found := _LAYER.fullmatch(name)) is None:
            continue
        layer, module, side = found.groups()
        if n_layers and int(layer) >= n_layers:
            yield f"{name} is not in the model, which has {n_layers} layers"
        size = shape[1 if side == "A" else 0]
        if hidden and f"{module} {side}" in _HIDDEN and size != hidden:
            yield f"{name} has a side of {size}, but the model's hidden size is {hidden}"
