"""vLLM's LoRA adapter for each request.

vLLM's CPU build (0.32) has a bug: a row without an adapter gets the adapter in the last slot if both kinds of rows are
in one batch. The answers do not show it. So on a CPU, rows without an adapter get one whose weights are all 0.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson

from batchkit.config.tables import JobConfig
from batchkit.engines.process.launcher import DOING
from batchkit.engines.vllm.adapters import CONFIG, WEIGHTS, Adapter, adapters_of
from batchkit.errors import EngineError
from batchkit.types import Request


class Loras:
    """The adapters of ``job``. Each answers a short prompt with ``llm`` once, which loads it.

    Raises:
        EngineError: vLLM refuses an adapter.
    """

    def __init__(self, job: JobConfig, llm: Any) -> None:
        from vllm.platforms import current_platform

        self._of_all = _of_all_rows(job)
        self._zero: TemporaryDirectory[str] | None = None
        self._by_name: dict[str, Any] = {"": None}
        adapters = adapters_of(job)
        for adapter in adapters:
            _try(adapter, llm)
            self._by_name[adapter.name] = adapter.request
        if adapters and current_platform.is_cpu():
            self._zero = TemporaryDirectory(prefix="zero-adapter-")
            self._by_name[""] = _zero_adapter(adapters[0], Path(self._zero.name)).request

    def of(self, request: Request) -> Any:
        """Return vLLM's ``LoRARequest`` for the request's adapter, or None for the base model."""
        return self._of_all or self._by_name[request.lora or ""]

    def close(self) -> None:
        if self._zero is not None:
            self._zero.cleanup()


def _try(adapter: Adapter, llm: Any) -> None:
    """Answer a short prompt with ``adapter``. Print its name first, so that engine.log shows it if the engine
    crashes."""
    from vllm import SamplingParams

    place = f"engine.loras.{adapter.name}: {adapter.folder}"
    print(f"{DOING}it loaded {place}", file=sys.stderr, flush=True)
    params = SamplingParams(max_tokens=1)
    try:
        llm.generate("tea", params, use_tqdm=False, lora_request=adapter.request)
    except Exception as error:  # the adapter's loading runs the model's code
        raise EngineError(
            f"{place}: vLLM can't load this adapter: {type(error).__name__}: {error}"
        ) from error


def _of_all_rows(job: JobConfig) -> Any:
    """Return vLLM's ``LoRARequest`` for ``engine.lora``, the adapter of all rows; None if it is not set."""
    if job.engine.lora is None:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest("adapter", 1, job.engine.lora)


def _zero_adapter(like: Adapter, folder: Path) -> Adapter:
    """Write an adapter that changes nothing to ``folder``: the matrices of ``like`` with rank 1, all 0."""
    import numpy as np
    from safetensors.numpy import save_file

    zeros = {}
    for name, shape in like.shapes.items():
        if name.endswith(".lora_A.weight"):
            zeros[name] = np.zeros([1, *shape[1:]], np.float32)
        elif name.endswith(".lora_B.weight"):
            zeros[name] = np.zeros([*shape[:-1], 1], np.float32)
    save_file(zeros, folder / WEIGHTS)
    config = {**like.config, "r": 1, "lora_alpha": 1, "rank_pattern": {}, "alpha_pattern": {}}
    (folder / CONFIG).write_bytes(orjson.dumps(config))
    shapes = {name: tensor.shape for name, tensor in zeros.items()}
    return Adapter("", folder, config, shapes)
