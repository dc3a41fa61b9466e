"""Engines, by the name in ``engine.kind``. Each is imported on use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from batchkit.config import JobConfig
from batchkit.engines.base import Engine, Preflight

ENGINES = {
    "vllm": "batchkit.engines.vllm",
    "dry-run": "batchkit.engines.dry_run",
}


def open_preflight(job: JobConfig) -> Preflight:
    """What the job's engine can say about a request without loading the model.

    Raises:
        JobError: the engine's options or sampling parameters can't be right.
    """
    preflight: Preflight = _module(job).open_preflight(job)
    return preflight


def open_engine(job: JobConfig) -> Engine:
    """The job's engine, its model loaded.

    Raises:
        JobError: the engine's options or sampling parameters can't be right.
        EngineError: the model can't be loaded.
    """
    engine: Engine = _module(job).open_engine(job)
    return engine


def _module(job: JobConfig) -> Any:
    return import_module(ENGINES[job.engine.kind])
