"""Engines, by the name in ``engine.kind``. Each is imported on use."""

from __future__ import annotations

from collections.abc import Collection
from importlib import import_module
from typing import Any

from batchkit.config import JobConfig
from batchkit.engines.base import Engine, Preflight
from batchkit.engines.launcher import Launcher

ENGINES = {
    "vllm": "batchkit.engines.vllm",
    "transformers": "batchkit.engines.transformers",
    "dry-run": "batchkit.engines.dry_run",
    "openai-server": "batchkit.engines.openai_server",
}
# Where the job does not set it; an engine without a model in it says so itself. vLLM's least.
MAX_NUM_SEQS = {"vllm": 256, "transformers": 8}
LIGHT = ("dry-run", "openai-server")  # no model in them that could take the run's process along


def open_preflight(job: JobConfig) -> Preflight:
    """What the job's engine can say about a request without loading the model.

    Raises:
        JobError: the engine's options or sampling parameters can't be right.
    """
    preflight: Preflight = _module(job).open_preflight(job)
    return preflight


def open_engine(job: JobConfig, launcher: Launcher | None = None) -> Engine:
    """The job's engine, its model loaded: in a process of its own, unless ``engine.in_process``.

    With a ``launcher`` that has been used before, the process need not import its libraries.

    Raises:
        JobError: the engine's options or sampling parameters can't be right.
        EngineError: the model can't be loaded.
    """
    if job.engine.in_process or job.engine.kind in LIGHT:
        return load_engine(job)
    from batchkit.engines.process import ProcessEngine

    return ProcessEngine(job, launcher)


def load_engine(job: JobConfig) -> Engine:
    """As ``open_engine``, always in this process."""
    engine: Engine = _module(job).open_engine(job)
    return engine


def sampling_names(kind: str) -> Collection[str] | None:
    """What ``[sampling]`` may hold for an engine of ``kind``; None where it does not say."""
    names: Collection[str] | None = getattr(import_module(ENGINES[kind]), "SAMPLING", None)
    return names


def preload_engine(kind: str) -> None:
    """Import what an engine of ``kind`` needs, without touching a GPU."""
    import_module(ENGINES[kind]).preload()


def _module(job: JobConfig) -> Any:
    return import_module(ENGINES[job.engine.kind])
