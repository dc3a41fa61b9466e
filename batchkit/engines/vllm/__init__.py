"""The vLLM engine. Only this folder imports vLLM.

vLLM's front end runs inside this process; ``core.py`` says where its engine core does.
"""

from __future__ import annotations

import os

from batchkit.config.tables import JobConfig
from batchkit.engines.vllm.engine import VllmEngine
from batchkit.engines.vllm.options import QUIET, check_config, set_environment
from batchkit.engines.vllm.options import changing_options as changing_options
from batchkit.engines.vllm.options import speed_options as speed_options
from batchkit.engines.vllm.pooling import PoolingRenderer, processors_without_model
from batchkit.engines.vllm.renderer import VllmRenderer

REQUIRES = ("vllm",)
MAX_NUM_SEQS = 256  # vLLM's smallest default


def preload() -> None:
    """Import what vLLM itself imports before it forks its engine, without starting a device. What it logs
    goes to a file here; a worker process's error appears nowhere else."""
    if os.environ.get("VLLM_LOGGING_LEVEL") == QUIET:
        del os.environ["VLLM_LOGGING_LEVEL"]  # set in the run's own process, for its terminal
    set_environment("INFO")
    import vllm.engine.arg_utils
    import vllm.entrypoints.llm
    import vllm.v1.engine.core  # noqa: F401


def open_preflight(job: JobConfig) -> VllmRenderer | PoolingRenderer:
    """Checks options and sampling with vLLM's classes; needs the model's config and tokenizer."""
    vllm_config = check_config(job)
    from vllm.renderers import renderer_from_config

    renderer = renderer_from_config(vllm_config)
    if job.generates:
        return VllmRenderer(job, renderer, vllm_config)
    processors = processors_without_model(job, renderer, vllm_config)
    return PoolingRenderer(job, renderer, vllm_config, processors)


def open_engine(job: JobConfig) -> VllmEngine:
    return VllmEngine(job, check_config(job))
