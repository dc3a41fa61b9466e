"""Loads the model's weights, and finds the token ids that depend on them."""

from __future__ import annotations

import logging
from typing import Any

from batchkit.config.tables import JobConfig
from batchkit.engines.faults import StartFailed, fault_of
from batchkit.engines.process.startup import explain
from batchkit.engines.transformers.device import default_device
from batchkit.engines.transformers.options import Options

_LOG = logging.getLogger(__name__)
FLASH = "flash_attention_2"


def load_model(job: JobConfig, options: Options, config: Any) -> Any:
    """Load on one GPU, or on the CPU if there is none, unless ``device_map`` is set.

    Raises:
        StartFailed: it can't be loaded.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # it would fill engine.log
    source = {
        "revision": options.revision,
        "device_map": options.device_map,
        "attn_implementation": _attention(options.attn_implementation),
    }
    try:
        model = _class_for(config).from_pretrained(
            job.engine.model,
            dtype=options.dtype,
            trust_remote_code=options.trust_remote_code,
            **{name: value for name, value in source.items() if value is not None},
        )
        if job.engine.lora is not None:
            model.load_adapter(job.engine.lora)
        return (model if options.device_map else model.to(default_device())).eval()
    except Exception as error:
        # Loading runs the model's code and the device's drivers, which may raise any type.
        limits = {"max_num_seqs": options.max_num_seqs}
        raise StartFailed(explain(error, job.engine.model), fault_of(error), limits) from error


def eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """All tokens that end an answer: the tokenizer's and the model's generation config's."""
    listed = model.generation_config.eos_token_id
    found = listed if isinstance(listed, list) else [listed]
    return frozenset(number for number in [*found, tokenizer.eos_token_id] if number is not None)


def pad_token_id(model: Any, tokenizer: Any) -> int:
    """The padding token; any token will do if none is set, because padding is masked."""
    found = (model.generation_config.pad_token_id, tokenizer.pad_token_id)
    return next((number for number in found if number is not None), 0)


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
