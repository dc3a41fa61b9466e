"""The vLLM engine. Only this folder imports vLLM.

vLLM's front end runs in this process. ``core.py`` decides whether its engine core runs here or in another process.
"""

from __future__ import annotations

import os

from batchkit.config.tables import JobConfig
from batchkit.engines.vllm.engine import VllmEngine
from batchkit.engines.vllm.options import QUIET, check_config, set_environment
from batchkit.engines.vllm.options import changing_options as changing_options
from batchkit.engines.vllm.options import options_for_share as options_for_share
from batchkit.engines.vllm.options import speed_options as speed_options
from batchkit.engines.vllm.pooling import PoolingRenderer, processors_without_model
from batchkit.engines.vllm.renderer import VllmRenderer

REQUIRES = ("vllm",)
MAX_NUM_SEQS = 256  # vLLM's smallest default


def preload() -> None:
    """Import the modules that vLLM needs before the engine's process is forked, without starting a device.

    Also make vLLM log to a file, because a worker's error appears only in its log.
    """
    if os.environ.get("VLLM_LOGGING_LEVEL") == QUIET:
        # The run's own process set it to keep its terminal quiet.
        del os.environ["VLLM_LOGGING_LEVEL"]
    set_environment("INFO")
    import vllm.engine.arg_utils
    import vllm.entrypoints.llm
    import vllm.v1.engine.core  # noqa: F401


def open_preflight(job: JobConfig) -> VllmRenderer | PoolingRenderer:
    """Check options and sampling parameters with vLLM's own classes, and return a renderer.

    This needs the model's config and tokenizer, but not its weights.
    """
    vllm_config = check_config(job)
    from vllm.renderers import renderer_from_config

    renderer = renderer_from_config(vllm_config)
    if job.generates:
        return VllmRenderer(job, renderer, vllm_config)
    processors = processors_without_model(job, renderer, vllm_config)
    return PoolingRenderer(job, renderer, vllm_config, processors)


def open_engine(job: JobConfig) -> VllmEngine:
    return VllmEngine(job, check_config(job))
