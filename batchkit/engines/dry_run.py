"""An engine without a model (``kind = "dry-run"``), which answers every request immediately with a fixed sentence.

Use it to try a job's input, templates, media and output at full speed. The sentence says that no model wrote it, and
all ``n`` answers are equal. If the job requires a certain form of answer, the answer has this form:

- with ``output.parse``, JSON that fits the schema;
- for a required tool call, arguments that fit the tool's parameters;
- for the step of ``select.step``, the first candidate's name, ``1``;
- for a pooling task, numbers derived from the row's hash.
"""

from __future__ import annotations

import math
import re
import struct
import time
from collections import deque
from collections.abc import Mapping, Sequence
from hashlib import shake_128
from typing import Any

import orjson
from pydantic import PositiveInt

from batchkit.config.answer_schema import example, schema_in
from batchkit.config.tables import GENERATING, JobConfig, Table, TaskName
from batchkit.engines.base import EngineLoad, RenderedPrompt
from batchkit.engines.entities import entities_in, tags_of
from batchkit.engines.request_checks import problems_with
from batchkit.errors import JobError
from batchkit.rendering.body import task_of
from batchkit.rendering.messages import as_text
from batchkit.types import Choice, Completion, Pooled, Request, Usage

_DIMENSIONS = 8
_LABELS = ("LABEL_0", "LABEL_1")  # what transformers calls classes without names


class DryRunOptions(Table):
    latency_s: float = 0.0  # how long each request takes
    max_num_seqs: PositiveInt = 256


class DryRunEngine:
    """An engine that answers in the order of submission, without a model. Raises JobError if an option is wrong."""

    def __init__(self, job: JobConfig) -> None:
        given = job.engine.options
        if problems := problems_with("engine.options", DryRunOptions, given, job.engine.kind):
            raise JobError("\n".join(problems))
        options = DryRunOptions(**given)
        self._judge, self._task, self._in_json = job.select.step, job.task, job.parsing
        self._latency_s = options.latency_s
        self.max_num_seqs = options.max_num_seqs
        self.limits = {"max_num_seqs": options.max_num_seqs}
        self.versions: Mapping[str, str] = {}
        self._queue: deque[tuple[float, Request]] = deque()

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

    def abort(self, requests: Sequence[Request]) -> None:
        dropped = set(map(id, requests))
        self._queue = deque(one for one in self._queue if id(one[1]) not in dropped)

    def load(self) -> EngineLoad:
        running = min(len(self._queue), self.max_num_seqs)
        return EngineLoad(running, len(self._queue) - running, 0.0, 0)

    def close(self) -> None:
        self._queue.clear()

    def _answer(self, request: Request) -> Completion:
        prompt_tokens = len(as_text(request).split())
        if self._task not in GENERATING:
            task = task_of(request.endpoint, self._task)
            usage, pooled = Usage(prompt_tokens, 0), _pooled(request, task)
            return Completion(request, usage=usage, latency_s=self._latency_s, pooled=pooled)
        choice, n = self._choice(request), request.sampling.get("n") or 1
        usage = Usage(prompt_tokens, n * len(choice.text.split()))
        return Completion(request, [choice] * n, usage, self._latency_s)

    def _choice(self, request: Request) -> Choice:
        text = f"dry-run: no model answered row {request.row.index}"
        if request.speech is not None and request.speech.timestamps:
            text = "".join(f"<|0.00|>{text}<|{clip.seconds:.2f}|>" for clip in request.clips)
        if request.step == self._judge:
            return Choice("1", "stop")
        if (call := _forced_call(request, text)) is not None:
            return Choice("", "tool_calls", tool_calls=[call])
        if request.step in self._in_json:
            schema = schema_in(request.sampling)
            value = {"answer": text} if schema is None else example(schema, text)
            text = orjson.dumps(value).decode()
        return Choice(text, "stop")


class DryRunPreflight:
    """A preflight that shows messages as text. It has no tokenizer, so it counts words as tokens."""

    def render(self, request: Request) -> RenderedPrompt:
        text = as_text(request)
        return RenderedPrompt(text, len(text.split()))


def open_engine(job: JobConfig) -> DryRunEngine:
    return DryRunEngine(job)


def open_preflight(job: JobConfig) -> DryRunPreflight:
    open_engine(job)
    return DryRunPreflight()


def _forced_call(request: Request, text: str) -> dict[str, Any] | None:
    """Return a tool call that fits the tool's parameters, if ``tool_choice`` requires a call; otherwise None."""
    choice = request.tool_choice
    if not request.tools or choice in (None, "auto", "none"):
        return None
    tools = {tool["function"]["name"]: tool["function"] for tool in request.tools}
    named = choice["function"]["name"] if isinstance(choice, Mapping) else next(iter(tools))
    arguments = example(tools[named].get("parameters") or {"type": "object"}, text)
    function = {"name": named, "arguments": orjson.dumps(arguments).decode()}
    return {"id": f"call_{request.row.index}", "type": "function", "function": function}


def _pooled(request: Request, task: TaskName) -> Pooled:
    if task == "score":
        assert request.pair is not None
        return Pooled(scores=_numbers(request, len(request.pair.documents)))
    if task == "classify":
        numbers = _numbers(request, len(_LABELS))
        probabilities = [number / sum(numbers) for number in numbers]
        likeliest = max(range(len(_LABELS)), key=probabilities.__getitem__)
        return Pooled(probabilities=probabilities, label=_LABELS[likeliest])
    if task == "token_embed":
        whole = _pooled(request, "embed").vector or b""
        tokens = 1 + len((request.prompt or "").split())  # depends on the prompt, as with a model
        return Pooled(vector=whole * tokens, tokens=tokens)
    if task == "token_classify":
        return _classified(as_text(request), _numbers(request, len(_LABELS)))
    vector = [2 * n - 1 for n in _numbers(request, request.sampling.get("dimensions", _DIMENSIONS))]
    length = math.hypot(*vector) if request.sampling.get("use_activation", True) else 1.0
    return Pooled(vector=struct.pack(f"<{len(vector)}f", *(part / length for part in vector)))


def _classified(text: str, numbers: Sequence[float]) -> Pooled:
    """Return token classes for ``text``: each word counts as a token, and labels alternate from word to word."""
    import numpy as np

    words = [match.span() for match in re.finditer(r"\S+", text)]
    places: list[tuple[int, int] | None] = [None, *words]  # None: a special token, as with a model
    scores = np.array([np.roll(numbers, n % len(_LABELS)) for n in range(len(places))], "<f4")
    scores /= scores.sum(axis=1, keepdims=True)
    entities = entities_in(text, places, scores, tags_of(dict(enumerate(_LABELS)), len(_LABELS)))
    return Pooled(vector=scores.tobytes(), tokens=len(places), entities=entities)


def _numbers(request: Request, count: int) -> list[float]:
    """Return ``count`` numbers between 0 and 1, derived from the row's hash."""
    digest = shake_128(request.input_hash.encode()).digest(4 * count)
    return [(whole + 0.5) / 2**32 for whole in struct.unpack(f"<{count}I", digest)]
