"""Packages of others, installed beside batchkit in ``site``; and an engine of one of them, which can be made to fail."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchkit.config.tables import JobConfig
from batchkit.engines.base import EngineLoad, RenderedPrompt
from batchkit.types import Choice, Completion, Request, Usage
from tests.support.paths import ROOT

ENGINE = f"[batchkit.engines]\nours = {__name__}\n"
"""The entry point of ``engine.kind = "ours"``, the engine in this file."""


def installed(entry_points: str, **modules: str) -> str:
    """The ``PYTHONPATH`` of a process that finds a package with ``modules``, code by name, and ``entry_points``."""
    site = Path("site").absolute()
    about = site / "ours-1.0.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: ours\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(entry_points)
    for name, code in modules.items():
        (site / f"{name}.py").write_text(code)
    return os.pathsep.join([str(ROOT), str(site)])


class Ours:
    """Answers ``latency_s`` after the last request; "loses" or "repeats" row 3, as its option ``mistake`` says; with
    ``speculative_config``, rows in its list ``wrong`` get another answer than without it."""

    max_num_seqs = 8
    limits: Mapping[str, Any] = {"max_num_seqs": 8}
    versions: Mapping[str, str] = {}

    def __init__(self, job: JobConfig) -> None:
        options = job.engine.options
        self._latency_s = options.get("latency_s", 0)
        self._times_of_3 = {"loses": 0, "repeats": 2}.get(options.get("mistake"), 1)
        self._wrong = options.get("speculative_config", {}).get("wrong", [])
        self._requests: list[Request] = []
        self._due = 0.0

    def submit(self, request: Request) -> None:
        self._requests.append(request)
        self._due = time.monotonic() + self._latency_s

    def poll(self, timeout_s: float) -> Sequence[Completion]:
        if (wait_s := self._due - time.monotonic()) > 0:
            time.sleep(min(wait_s, timeout_s))
            return []
        requests, self._requests = self._requests, []
        times = {3: self._times_of_3}
        return [
            self._answer(request)
            for request in requests
            for _ in range(times.get(request.row.index, 1))
        ]

    def abort(self, requests: Sequence[Request]) -> None:
        """All will be answered."""

    def load(self) -> EngineLoad:
        return EngineLoad(len(self._requests), 0, 0.0, 0)

    def close(self) -> None:
        self._requests.clear()

    def _answer(self, request: Request) -> Completion:
        text = f"{request.step} answer {request.row.index}".strip()
        if request.row.index in self._wrong:
            text += ", drafted"
        return Completion(request, [Choice(text, "stop")], Usage(1, 3))


class OurPreflight:
    def render(self, request: Request) -> RenderedPrompt:
        return RenderedPrompt("", 1)


def open_engine(job: JobConfig) -> Ours:
    return Ours(job)


def open_preflight(job: JobConfig) -> OurPreflight:
    return OurPreflight()
