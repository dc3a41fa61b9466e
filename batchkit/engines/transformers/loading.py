"""Loads the model's weights, and looks after the device that they are on."""

from __future__ import annotations

import gc
import logging
from typing import Any, NamedTuple

from batchkit.config.tables import JobConfig
from batchkit.engines.faults import StartFailed, fault_of
from batchkit.engines.process.startup import explain
from batchkit.engines.transformers.options import Options

_LOG = logging.getLogger(__name__)
FLASH = "flash_attention_2"


class Loaded(NamedTuple):
    """A model in memory. ``eos_ids`` end an answer; ``device``: where its inputs go."""

    model: Any
    device: Any
    eos_ids: frozenset[int]
    pad_token_id: int


def load_model(job: JobConfig, options: Options, config: Any, tokenizer: Any) -> Loaded:
    """Load on one GPU, or on the CPU if there is none, unless ``device_map`` is set.

    Raises:
        StartFailed: it can't be loaded.
    """
    import torch
    from transformers import GenerationConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # it would fill engine.log
    placed = {
        "device_map": options.device_map,
        "attn_implementation": _attention(options.attn_implementation),
    }
    try:
        model = _class_for(config).from_pretrained(
            job.engine.model_source,
            dtype=options.dtype,
            revision=options.revision or "main",
            trust_remote_code=options.trust_remote_code,
            **{name: value for name, value in placed.items() if value is not None},
        )
        if job.engine.lora is not None:
            model.load_adapter(job.engine.lora)
        if not options.device_map:
            model.to("cuda" if torch.cuda.is_available() else "cpu")
    except Exception as error:
        # Loading runs the model's code and the device's drivers, which may raise any type.
        limits = {"max_num_seqs": options.max_num_seqs}
        raise StartFailed(explain(error, job.engine.model), fault_of(error), limits) from error
    own = model.generation_config
    # Otherwise the model's own temperature and penalties would apply beneath those of the rows.
    model.generation_config = GenerationConfig()
    listed = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
    ends = frozenset(n for n in [*listed, tokenizer.eos_token_id] if n is not None)
    # Any token will do if none is set, because padding is masked.
    pads = [n for n in (own.pad_token_id, tokenizer.pad_token_id, 0) if n is not None]
    return Loaded(model.eval(), model.get_input_embeddings().weight.device, ends, pads[0])


def free_memory() -> None:
    """Release memory that nothing refers to any more."""
    import torch

    gc.collect()  # an error and its frames, which hold tensors, refer to each other
    torch.cuda.empty_cache()  # does nothing if no GPU is in use


def is_sound(device: Any) -> bool:
    """Whether it still computes: a GPU that has failed once also fails on everything later."""
    import torch

    try:
        return bool(torch.ones(1, device=device).add(1).item() == 2)
    except RuntimeError:
        return False


def _class_for(config: Any) -> Any:
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING as WITH_IMAGES
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    is_remote = AutoModelForImageTextToText.__name__ in (getattr(config, "auto_map", None) or {})
    return (
        AutoModelForImageTextToText
        if is_remote or type(config) in WITH_IMAGES
        else AutoModelForCausalLM
    )


def _attention(wanted: str | None) -> str | None:
    from transformers.utils import is_flash_attn_2_available

    if wanted != FLASH or is_flash_attn_2_available():
        return wanted
    _LOG.warning(
        "engine.options.attn_implementation: no package for %s here; the default is taken", FLASH
    )
    return None
