"""The transformers engine: ``model.generate``'s own preparation under a loop of ours, in batches.

For machines without vLLM, and as a second opinion on its answers. Batches are static: rows of
about one length begin together, each is handed on at its own end, and the next batch begins when
all have ended. The only place, beside ``engines/vllm.py``, where a model is loaded.
"""

from __future__ import annotations

import os
import warnings

from batchkit.config.tables import JobConfig
from batchkit.engines.transformers.engine import TransformersEngine
from batchkit.engines.transformers.options import options_of
from batchkit.engines.transformers.rendering import TransformersRenderer
from batchkit.engines.transformers.sampling import Sampling

SAMPLING = Sampling.model_fields


def preload() -> None:
    """Import what loading a model needs: no device has been started."""
    _set_environment()
    from transformers import (  # noqa: F401
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoProcessor,
    )


def open_preflight(job: JobConfig) -> TransformersRenderer:
    """Needs the model's config, tokenizer and processor; not its weights.

    Raises:
        JobError: an option or a sampling parameter is wrong, or the model's files are missing.
    """
    options = options_of(job)
    _set_environment()
    return TransformersRenderer(job, options)


def open_engine(job: JobConfig) -> TransformersEngine:
    """Loads the model.

    Raises:
        JobError: an option or a sampling parameter is wrong, or the model's files are missing.
        StartFailed: the model can't be loaded.
    """
    renderer = open_preflight(job)
    return TransformersEngine(job, options_of(job), renderer)


def _set_environment() -> None:
    """What must stand before transformers is imported; what the user set is left alone."""
    for name, value in {
        "TRANSFORMERS_VERBOSITY": "error",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")
