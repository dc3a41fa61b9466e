"""A fake engine with ``speculative_config``. Rows in its list ``wrong`` get another answer than without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchkit.config.tables import JobConfig
from batchkit.engines.base import EngineLoad, RenderedPrompt
from batchkit.types import Choice, Completion, Request, Usage


def installed(folder: Path) -> Path:
    """The folder to put into ``PYTHONPATH``, so that ``engine.kind = "drafting"`` is this engine."""
    info = folder / "drafting-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: drafting\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[batchkit.engines]\ndrafting = {__name__}\n")
    return folder


class Drafting:
    max_num_seqs = 8
    limits: Mapping[str, Any] = {"max_num_seqs": 8}
    versions: Mapping[str, str] = {}

    def __init__(self, job: JobConfig) -> None:
        self._wrong = job.engine.options.get("speculative_config", {}).get("wrong", [])
        self._requests: list[Request] = []

    def submit(self, request: Request) -> None:
        self._requests.append(request)

    def poll(self, timeout_s: float) -> Sequence[Completion]:
        requests, self._requests = self._requests, []
        return [self._answer(request) for request in requests]

    def abort(self, requests: Sequence[Request]) -> None:
        """All are answered already."""

    def load(self) -> EngineLoad:
        return EngineLoad(len(self._requests), 0, 0.0, 0)

    def close(self) -> None:
        self._requests.clear()

    def _answer(self, request: Request) -> Completion:
        text = f"{request.step} answer {request.row.index}".strip()
        if request.row.index in self._wrong:
            text += ", drafted"
        return Completion(request, [Choice(text, "stop")], Usage(1, 3))


class DraftingPreflight:
    def render(self, request: Request) -> RenderedPrompt:
        return RenderedPrompt("", 1)


def open_engine(job: JobConfig) -> Drafting:
    return Drafting(job)


def open_preflight(job: JobConfig) -> DraftingPreflight:
    return DraftingPreflight()
