"""An engine without a model: it answers every request at once with a fixed sentence.

For trying a job's input, templates, media and ledger at full speed. Its answers mean nothing, and
say so. Options: ``latency_s`` (how long each request takes) and ``max_num_seqs``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from batchkit.config.tables import JobConfig
from batchkit.engines.base import EngineLoad, RenderedPrompt
from batchkit.errors import JobError
from batchkit.types import Choice, Completion, Request, Usage

_OPTIONS = {"latency_s": 0.0, "max_num_seqs": 256}


class DryRunEngine:
    """Answers in the order of submission, each request after ``latency_s``."""

    def __init__(self, *, latency_s: float, max_num_seqs: int) -> None:
        self._latency_s = latency_s
        self._max_num_seqs = max_num_seqs
        self._queue: deque[tuple[float, Request]] = deque()

    @property
    def max_num_seqs(self) -> int:
        return self._max_num_seqs

    @property
    def limits(self) -> Mapping[str, Any]:
        return {"max_num_seqs": self._max_num_seqs}

    @property
    def versions(self) -> Mapping[str, str]:
        return {}

    def submit(self, request: Request) -> None:
        self._queue.append((time.monotonic() + self._latency_s, request))

    def poll(self, timeout_s: float) -> Sequence[Completion]:
        if self._queue and (wait_s := self._queue[0][0] - time.monotonic()) > 0:
            time.sleep(min(wait_s, timeout_s))
        now, done = time.monotonic(), []
        while self._queue and self._queue[0][0] <= now:
            _, request = self._queue.popleft()
            done.append(_answer(request, self._latency_s))
        return done

    def load(self) -> EngineLoad:
        running = min(len(self._queue), self._max_num_seqs)
        return EngineLoad(running, len(self._queue) - running, 0.0, 0)

    def close(self) -> None:
        self._queue.clear()


class DryRunPreflight:
    """Shows the messages; it has no tokenizer, so it counts words as tokens."""

    def render(self, request: Request) -> RenderedPrompt:
        text = _text(request)
        return RenderedPrompt(text, len(text.split()))


def preload() -> None:
    """There is nothing to import."""


def open_engine(job: JobConfig) -> DryRunEngine:
    options = job.engine.options
    for name in options:
        if name not in _OPTIONS:
            raise JobError(f"engine.options.{name}: unknown; dry-run knows {', '.join(_OPTIONS)}")
    try:
        return DryRunEngine(
            latency_s=float(options.get("latency_s", _OPTIONS["latency_s"])),
            max_num_seqs=int(options.get("max_num_seqs", _OPTIONS["max_num_seqs"])),
        )
    except (TypeError, ValueError) as error:
        raise JobError(f"engine.options: {error}") from error


def open_preflight(job: JobConfig) -> DryRunPreflight:
    open_engine(job)
    return DryRunPreflight()


def _answer(request: Request, latency_s: float) -> Completion:
    text = f"dry-run: no model answered row {request.row.index}"
    usage = Usage(len(_text(request).split()), len(text.split()))
    return Completion(request, [Choice(text, "stop")], usage, latency_s)


def _text(request: Request) -> str:
    if request.messages is None:
        return request.prompt or ""
    lines = []
    for message in request.messages:
        content = message["content"]
        if not isinstance(content, str):
            content = "".join(part.get("text", "<image>") for part in content)
        lines.append(f"{message['role']}: {content}")
    return "\n".join(lines)
