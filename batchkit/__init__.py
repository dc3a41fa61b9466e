"""batchkit: offline batch inference on vLLM that never loses a finished row."""

from __future__ import annotations

TYPE_CHECKING = False  # not imported from typing: that import takes longer than all other code here
if TYPE_CHECKING:
    from typing import Any

    from batchkit.config.loading import load_job as load_job
    from batchkit.config.tables import JobConfig as JobConfig
    from batchkit.execution.generate import generate as generate
    from batchkit.execution.processor import ProductionBatchProcessor as ProductionBatchProcessor
    from batchkit.execution.summary import Outcome as Outcome
    from batchkit.execution.summary import RunSummary as RunSummary
    from batchkit.runs.run import Run as Run

    __version__: str

__all__ = [
    "JobConfig",
    "Outcome",
    "ProductionBatchProcessor",
    "Run",
    "RunSummary",
    "generate",
    "load_job",
]

_HOMES = {
    "JobConfig": "batchkit.config.tables",
    "Outcome": "batchkit.execution.summary",
    "ProductionBatchProcessor": "batchkit.execution.processor",
    "Run": "batchkit.runs.run",
    "RunSummary": "batchkit.execution.summary",
    "generate": "batchkit.execution.generate",
    "load_job": "batchkit.config.loading",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``import batchkit`` is fast."""
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("batchkit-vllm")
        except PackageNotFoundError:  # files that were not installed
            return "0.0"
    if name not in _HOMES:
        raise AttributeError(f"module 'batchkit' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
