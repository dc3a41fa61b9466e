"""The transformers engine: ``model.generate`` in batches, with tokens selected by batchkit.

It is for machines without vLLM, and for checks of vLLM's answers. Batches are static: rows of similar length start
together, each row is returned when its answer ends, and the next batch starts when all answers have ended.

batchkit selects tokens itself because ``generate`` has one sampling configuration and one random generator per batch,
while every row has its own. Moreover, ``generate`` returns nothing before the longest row has ended, and its stop
strings, ``min_tokens`` and logprobs differ from vLLM's.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from batchkit.config.tables import JobConfig
from batchkit.engines.transformers.engine import TransformersEngine
from batchkit.engines.transformers.options import TransformersOptions, options_of
from batchkit.engines.transformers.rendering import TransformersRenderer
from batchkit.engines.vllm.options import set_environment

REQUIRES = ("torch", "transformers")
MAX_NUM_SEQS: int = TransformersOptions.model_fields["max_num_seqs"].default


def changing_options(job: JobConfig) -> dict[str, Any]:
    """Return the attention implementations that the job does not use. They may be faster, but may change answers.
    Raises JobError if the job can't be run."""
    options = options_of(job)
    attentions = ["sdpa", "flash_attention_2"] if find_spec("flash_attn") else ["sdpa"]
    others = [name for name in attentions if name != (options.attn_implementation or "sdpa")]
    return {"attn_implementation": others}


def preload() -> None:
    """Import the packages that loading a model needs, without starting a device."""
    set_environment()
    from transformers import (  # noqa: F401
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoProcessor,
    )


def open_preflight(job: JobConfig) -> TransformersRenderer:
    """Return the renderer, which needs the model's config, tokenizer and processor, but not its weights."""
    return TransformersRenderer(job, options_of(job))


def open_engine(job: JobConfig) -> TransformersEngine:
    return TransformersEngine(job, options_of(job), open_preflight(job))
