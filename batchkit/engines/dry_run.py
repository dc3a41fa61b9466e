"""An engine without a model: it answers every request at once with a fixed sentence.

For trying a job's input, templates, media and ledger at full speed. Its answers mean nothing, and
say so; with ``output.parse`` they are JSON that fits the schema. Options: ``latency_s`` (how long each request takes) and ``max_num_seqs``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from pydantic import PositiveInt

from batchkit.config.answer_schema import example, schema_in
from batchkit.config.tables import JobConfig, Table
from batchkit.engines.base import EngineLoad, RenderedPrompt
from batchkit.engines.request_checks import problems_with
from batchkit.errors import JobError
from batchkit.types import Choice, Completion, Request, Usage


class Options(Table):
    latency_s: float = 0.0
    max_num_seqs: PositiveInt = 256


class DryRunEngine:
    """Answers in the order of submission, each request after ``latency_s``."""

    def __init__(self, options: Options, *, in_json: bool = False) -> None:
        self._in_json = in_json
        self._latency_s = options.latency_s
        self._max_num_seqs = options.max_num_seqs
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
            done.append(self._answer(request))
        return done

    def load(self) -> EngineLoad:
        running = min(len(self._queue), self._max_num_seqs)
        return EngineLoad(running, len(self._queue) - running, 0.0, 0)

    def close(self) -> None:
        self._queue.clear()

    def _answer(self, request: Request) -> Completion:
        text = f"dry-run: no model answered row {request.row.index}"
        if self._in_json:
            schema = schema_in(request.sampling)
            value = {"answer": text} if schema is None else example(schema, text)
            text = orjson.dumps(value).decode()
        usage = Usage(len(_text(request).split()), len(text.split()))
        return Completion(request, [Choice(text, "stop")], usage, self._latency_s)


class DryRunPreflight:
    """Shows the messages; it has no tokenizer, so it counts words as tokens."""

    def render(self, request: Request) -> RenderedPrompt:
        text = _text(request)
        return RenderedPrompt(text, len(text.split()))


def open_engine(job: JobConfig) -> DryRunEngine:
    given = job.engine.options
    if problems := problems_with("engine.options", Options, given, job.engine.kind):
        raise JobError("\n".join(problems))
    return DryRunEngine(Options(**given), in_json=job.output.parse is not None)


def open_preflight(job: JobConfig) -> DryRunPreflight:
    open_engine(job)
    return DryRunPreflight()


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
