"""The transformers engine: ``model.generate`` in batches, with our own choice of tokens.

For machines without vLLM, and as a second opinion on its answers. Batches are static: rows of
similar length start together, each is returned when it ends, and the next batch starts when all
have ended. Besides ``engines/vllm/``, this is the only place that loads a model.

The choice of tokens is ours because ``generate`` has one sampling configuration and one random
generator for a batch. Every row here has its own seed, also if the job sets none, so grouping rows
by equal sampling would run each sampled row alone. ``generate`` also returns nothing before the
longest row has ended, and its stop strings, ``min_tokens`` and logprobs differ from vLLM's.
"""

from __future__ import annotations

import os
import warnings

from batchkit.config.tables import JobConfig
from batchkit.engines.transformers.engine import TransformersEngine
from batchkit.engines.transformers.options import Options, options_of
from batchkit.engines.transformers.rendering import TransformersRenderer
from batchkit.engines.transformers.sampling import Sampling

REQUIRES = ("torch", "transformers")
SAMPLING = Sampling.model_fields
MAX_NUM_SEQS: int = Options.model_fields["max_num_seqs"].default


def preload() -> None:
    """Import what loading a model needs, without starting a device."""
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
    """Variables that must be set before transformers is imported; those the user set are kept."""
    for name, value in {
        "TRANSFORMERS_VERBOSITY": "error",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")
