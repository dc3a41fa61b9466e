"""The engine: runs static batches, and recovers when one of them fails."""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import psutil

from batchkit.config.tables import JobConfig
from batchkit.engines.base import EngineLoad
from batchkit.engines.faults import EngineDied, Fault, fault_of
from batchkit.engines.memory_ladder import Ladder
from batchkit.engines.transformers.answer import Answer
from batchkit.engines.transformers.batch import collate, next_batch
from batchkit.engines.transformers.decoding import Decoder
from batchkit.engines.transformers.device import free_memory, is_sound
from batchkit.engines.transformers.loading import eos_ids, load_model, pad_token_id
from batchkit.engines.transformers.options import Options
from batchkit.engines.transformers.rendering import TransformersRenderer
from batchkit.errors import EngineCrashError, RequestError, RowError, RowOutOfMemoryError
from batchkit.types import Completion, Request, Usage

STRETCH = 100  # answers before a reduced batch size is raised again
_LOG = logging.getLogger(__name__)  # warnings reach stderr, which is engine.log
# The model's Python code raises these for inputs that it can't take; torch raises RuntimeError.
_REFUSALS = (ValueError, TypeError, LookupError, AssertionError, NotImplementedError)


class _Asked(NamedTuple):
    """A request whose answers are not all finished."""

    request: Request
    since: float
    answers: Sequence[Answer]


class _Batch:
    """Answers that started together. ``tokens``: those of the last step, None before the first."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.answers = answers
        self.tokens: Any = None

    @property
    def unfinished(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.finish_reason is None]


class _Trouble(NamedTuple):
    """Why a step failed, without the error itself: its frames hold tensors."""

    fault: Fault
    is_refusal: bool


class TransformersEngine:
    """One thread does everything: it prepares submitted requests, then steps the current batch.

    A step gives each row of the batch a token, so no row waits ``run.row_timeout_s`` for one:
    ``run.stall_timeout_s`` catches a step that hangs.

    When memory runs out, the batch is halved and started again. When a batch fails for another
    reason, its rows run one by one, so that only the row at fault fails.
    """

    def __init__(self, job: JobConfig, options: Options, renderer: TransformersRenderer) -> None:
        import torch
        import transformers

        self._options = options
        self._renderer = renderer
        self._seed = job.run.seed
        self._model = load_model(job, options, renderer.config)
        self._device = self._model.get_input_embeddings().weight.device
        self._eos_ids = eos_ids(self._model, renderer.tokenizer)
        self._pad_token_id = pad_token_id(self._model, renderer.tokenizer)
        self._decoder = Decoder(self._model, pad_token_id=self._pad_token_id)
        self._versions = {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        }
        self._process = psutil.Process() if job.run.max_host_gb is not None else None
        self._submitted: deque[tuple[Request, float]] = deque()
        self._asked: dict[int, _Asked] = {}
        self._waiting: list[Answer] = []
        self._alone: list[Answer] = []  # run first, each in its own batch
        self._batch: _Batch | None = None
        self._ladder = Ladder(stretch=STRETCH)
        self._safe_steps = list(self._ladder.steps)

    @property
    def max_num_seqs(self) -> int:
        return self._options.max_num_seqs

    @property
    def limits(self) -> Mapping[str, Any]:
        return {"max_num_seqs": self._options.max_num_seqs}

    @property
    def versions(self) -> Mapping[str, str]:
        return self._versions

    def submit(self, request: Request) -> None:
        self._submitted.append((request, time.monotonic()))

    def poll(self, timeout_s: float) -> Sequence[Completion]:
        deadline = time.monotonic() + timeout_s
        done: list[Completion] = []
        while not done and (self._submitted or self._asked):
            if self._submitted:
                done = self._prepare(*self._submitted.popleft())
            else:
                done = self._step(self._batch or self._begin())
            if time.monotonic() >= deadline:
                break
        return done

    def load(self) -> EngineLoad:
        running = len(self._batch.unfinished) if self._batch is not None else 0
        waiting = len(self._submitted) + len(self._waiting) + len(self._alone)
        host_bytes = self._process.memory_info().rss if self._process is not None else 0
        return EngineLoad(running, waiting, 0.0, 0, host_bytes)

    def close(self) -> None:
        self._submitted.clear()
        self._asked.clear()
        self._waiting.clear()
        self._alone.clear()
        self._batch = None
        if self._model is not None:
            self._decoder.close()
            del self._decoder
            self._model = None
            free_memory()

    def _prepare(self, request: Request, since: float) -> list[Completion]:
        """Empty, unless the request is refused."""
        try:
            prepared = self._renderer.prepare(request)
        except RowError as error:
            return [Completion(request, error=error)]
        answers = [
            Answer(
                prepared,
                number,
                tokenizer=self._renderer.tokenizer,
                eos_ids=self._eos_ids,
                seed=self._seed_of(request, prepared.sampling.seed, number),
            )
            for number in range(prepared.sampling.n)
        ]
        self._asked[id(request)] = _Asked(request, since, answers)
        self._waiting += answers
        return []

    def _seed_of(self, request: Request, own: int | None, number: int) -> int:
        if own is not None:
            return own + number
        name = f"{self._seed}/{request.row.index}/{request.attempt}/{number}"
        return random.Random(name).getrandbits(63)

    def _begin(self) -> _Batch:
        """The next batch, before its first step."""
        if self._alone:
            answers = [self._alone.pop(0)]
        else:
            answers = next_batch(self._waiting, self._size)
            taken = set(map(id, answers))
            self._waiting = [answer for answer in self._waiting if id(answer) not in taken]
        for answer in answers:
            answer.begin()
        self._batch = _Batch(answers)
        return self._batch

    @property
    def _size(self) -> int:
        size: int = self._ladder.overrides.get("max_num_seqs", self.max_num_seqs)
        return size

    def _step(self, batch: _Batch) -> list[Completion]:
        """Add one token to each unfinished answer; returns the requests that this completes."""
        try:
            self._advance(batch)
        except Exception as error:  # the model's own code, and the device's libraries
            trouble = _Trouble(fault_of(error), isinstance(error, _REFUSALS))
        else:
            done = [self._completed(answer) for answer in batch.answers]
            if not batch.unfinished:
                self._count_success(batch)
                self._end_batch()
            return [completion for completion in done if completion is not None]
        return self._recover(batch, trouble)

    def _prefill(self, batch: _Batch) -> Any:
        inputs = collate([answer.prepared.inputs for answer in batch.answers], self._pad_token_id)
        for name, value in inputs.items():
            dtype = self._model.dtype if value.is_floating_point() else None
            inputs[name] = value.to(self._device, dtype)
        return self._decoder.begin(inputs, max(a.prepared.max_tokens for a in batch.answers))

    def _advance(self, batch: _Batch) -> None:
        logits = (
            self._decoder.step(batch.tokens) if batch.tokens is not None else self._prefill(batch)
        )
        batch.tokens = logits.argmax(-1)
        for row, answer in enumerate(batch.answers):
            if answer.finish_reason is not None:
                batch.tokens[row] = self._pad_token_id
            elif not answer.takes_the_likeliest:
                batch.tokens[row] = answer.choose(logits[row])
        for row, token_id in enumerate(batch.tokens.tolist()):
            if batch.answers[row].finish_reason is None:
                batch.answers[row].take(token_id, logits[row])

    def _completed(self, answer: Answer) -> Completion | None:
        """The completion of the answer's request, if all of its answers are finished."""
        asked = self._asked.get(id(answer.prepared.request))
        if asked is None or any(other.finish_reason is None for other in asked.answers):
            return None
        del self._asked[id(asked.request)]
        prepared = answer.prepared
        usage = Usage(prepared.prompt_tokens, sum(len(a.token_ids) for a in asked.answers))
        return Completion(
            asked.request,
            [other.to_choice() for other in asked.answers],
            usage,
            time.monotonic() - asked.since,
            prompt=prepared.text,
        )

    def _count_success(self, batch: _Batch) -> None:
        self._safe_steps = list(self._ladder.steps)
        if self._ladder.succeeded(len(batch.answers)):
            self._ladder.step_up()
            _LOG.warning("a stretch of success: batches of up to %d again", self._size)

    def _end_batch(self) -> None:
        self._decoder.end()
        self._batch = None

    def _recover(self, batch: _Batch, trouble: _Trouble) -> list[Completion]:
        """The batch failed: queue its unfinished answers again, or fail a request that ran alone.

        Raises:
            EngineDied: the engine can't recover.
        """
        fault, unfinished = trouble.fault, batch.unfinished
        self._end_batch()
        free_memory()
        if fault.kind == "oom" and not self._options.shrink_on_oom:
            raise EngineDied(fault)
        if fault.kind != "oom" and not is_sound(self._device):
            raise EngineDied(fault)
        if len(batch.answers) == 1:
            if fault.kind == "oom":  # it says nothing about the batch size
                self._ladder.steps = list(self._safe_steps)
            return [self._failed(unfinished[0].prepared.request, trouble)]
        if fault.kind == "oom":
            self._ladder.step_down({"max_num_seqs": len(batch.answers)}, fault)
            _LOG.warning("out of memory (%s): batches of up to %d", fault, self._size)
            self._waiting = unfinished + self._waiting
        else:
            _LOG.warning("a batch failed (%s): falling back to sequential", fault)
            self._alone += unfinished
        return []

    def _failed(self, request: Request, trouble: _Trouble) -> Completion:
        asked = self._asked.pop(id(request))
        lost = set(map(id, asked.answers))
        self._waiting = [answer for answer in self._waiting if id(answer) not in lost]
        self._alone = [answer for answer in self._alone if id(answer) not in lost]
        latency_s = time.monotonic() - asked.since
        return Completion(request, latency_s=latency_s, error=_row_error(trouble))


def _row_error(trouble: _Trouble) -> RowError:
    fault = trouble.fault
    if fault.kind == "oom":
        return RowOutOfMemoryError(f"the engine runs out of memory on this row alone: {fault}")
    if trouble.is_refusal:
        return RequestError(f"the model can't take this row: {fault}")
    return EngineCrashError(f"the model fails on this row alone: {fault}")
