"""The engine: runs static batches, and recovers when one of them fails."""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import psutil

from batchkit.config.tables import JobConfig
from batchkit.engines.base import EngineLoad
from batchkit.engines.faults import EngineDied, Fault, fault_of
from batchkit.engines.memory_ladder import Ladder
from batchkit.engines.transformers.answer import Answer
from batchkit.engines.transformers.batch import Batch, next_batch
from batchkit.engines.transformers.loading import free_memory, is_sound, load_model
from batchkit.engines.transformers.options import Options
from batchkit.engines.transformers.rendering import TransformersRenderer
from batchkit.errors import EngineCrashError, RequestError, RowError, RowOutOfMemoryError
from batchkit.types import Completion, Request, Usage

STRETCH = 100  # answers before a reduced batch size is raised again
_LOG = logging.getLogger(__name__)  # warnings reach stderr, which is engine.log
# The model's Python code raises these for inputs that it can't take; torch raises RuntimeError.
_REFUSALS = (ValueError, TypeError, LookupError, AssertionError, NotImplementedError)


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
        self._loaded = load_model(job, options, renderer.config, renderer.tokenizer)
        self._versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        self._process = psutil.Process() if job.run.max_host_gb is not None else None
        self._submitted: deque[tuple[Request, float]] = deque()
        self._waiting: list[Answer] = []  # those that run alone come first
        self._batch: Batch | None = None
        self._ladder = Ladder(stretch=STRETCH)

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
        while not done and (self._submitted or self._waiting or self._batch):
            if self._submitted:
                done = self._prepare(*self._submitted.popleft())
            else:
                done = self._step(self._batch or self._begin())
            if time.monotonic() >= deadline:
                break
        return done

    def load(self) -> EngineLoad:
        running = len(self._batch.unfinished) if self._batch is not None else 0
        host_bytes = self._process.memory_info().rss if self._process is not None else 0
        return EngineLoad(running, len(self._submitted) + len(self._waiting), 0.0, 0, host_bytes)

    def close(self) -> None:
        self._submitted.clear()
        self._waiting.clear()
        self._end_batch()
        if hasattr(self, "_loaded"):
            del self._loaded
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
                since=since,
                seed=self._seed_of(request, prepared.sampling.seed, number),
                tokenizer=self._renderer.tokenizer,
                eos_ids=self._loaded.eos_ids,
            )
            for number in range(prepared.sampling.n)
        ]
        for answer in answers:
            answer.siblings = answers
        self._waiting += answers
        return []

    def _seed_of(self, request: Request, own: int | None, number: int) -> int:
        if own is not None:
            return own + number
        name = f"{self._seed}/{request.row.index}/{request.attempt}/{number}"
        return random.Random(name).getrandbits(63)

    def _begin(self) -> Batch:
        """The next batch, before its first step."""
        answers = next_batch(self._waiting, self._size)
        self._waiting = _without(self._waiting, answers)
        self._batch = Batch(answers, self._loaded)
        return self._batch

    @property
    def _size(self) -> int:
        size: int = self._ladder.overrides.get("max_num_seqs", self.max_num_seqs)
        return size

    def _step(self, batch: Batch) -> list[Completion]:
        """Give each unfinished answer a token; returns the requests that this completes."""
        unfinished = batch.unfinished
        try:
            ended = batch.step()
        except Exception as error:  # the model's own code, and the device's libraries
            # Without the error itself: its frames hold tensors.
            fault, is_refusal = fault_of(error), isinstance(error, _REFUSALS)
        else:
            if not batch.unfinished:
                self._count_success(batch)
                self._end_batch()
            siblings = {id(answer.siblings): answer.siblings for answer in ended}
            return [_completion(answers) for answers in siblings.values() if _are_finished(answers)]
        return self._recover(batch, unfinished, fault, is_refusal=is_refusal)

    def _count_success(self, batch: Batch) -> None:
        self._ladder.keep()
        if self._ladder.succeeded(len(batch.answers)):
            self._ladder.step_up()
            _LOG.warning("a stretch of success: batches of up to %d again", self._size)

    def _end_batch(self) -> None:
        if self._batch is not None:
            self._batch.end()
            self._batch = None

    def _recover(
        self, batch: Batch, unfinished: Sequence[Answer], fault: Fault, *, is_refusal: bool
    ) -> list[Completion]:
        """The batch failed: queue its ``unfinished`` answers again, or fail a request that ran alone.

        Raises:
            EngineDied: the engine can't recover.
        """
        is_oom, size = fault.kind == "oom", len(batch.answers)
        self._end_batch()
        free_memory()
        if not (self._options.shrink_on_oom if is_oom else is_sound(self._loaded.device)):
            raise EngineDied(fault)
        if size == 1:
            if is_oom:  # it says nothing about the batch size
                self._ladder.back()
            answer = unfinished[0]
            self._waiting = _without(self._waiting, answer.siblings)
            latency_s = time.monotonic() - answer.since
            error = _row_error(fault, is_refusal=is_refusal)
            return [Completion(answer.prepared.request, latency_s=latency_s, error=error)]
        if is_oom:
            self._ladder.step_down({"max_num_seqs": size}, fault)
            _LOG.warning("out of memory (%s): batches of up to %d", fault, self._size)
        else:
            _LOG.warning("a batch failed (%s): falling back to sequential", fault)
            for answer in unfinished:
                answer.runs_alone = True
        self._waiting = [*unfinished, *self._waiting]
        return []


def _without(waiting: Iterable[Answer], gone: Iterable[Answer]) -> list[Answer]:
    left_out = set(map(id, gone))
    return [answer for answer in waiting if id(answer) not in left_out]


def _are_finished(answers: Iterable[Answer]) -> bool:
    return all(answer.finish_reason is not None for answer in answers)


def _completion(answers: Sequence[Answer]) -> Completion:
    prepared = answers[0].prepared
    done = Completion(
        prepared.request,
        [answer.to_choice() for answer in answers],
        Usage(prepared.prompt_tokens, sum(len(answer.token_ids) for answer in answers)),
        time.monotonic() - answers[0].since,
        prompt=prepared.text,
    )
    if prepared.parser is None:
        return done
    prompt_ids = prepared.inputs["input_ids"][0].tolist()
    return prepared.parser.parsed(done, prompt_ids, [answer.token_ids for answer in answers])


def _row_error(fault: Fault, *, is_refusal: bool) -> RowError:
    if fault.kind == "oom":
        return RowOutOfMemoryError(f"the engine runs out of memory on this row alone: {fault}")
    if is_refusal:
        return RequestError(f"the model can't take this row: {fault}")
    return EngineCrashError(f"the model fails on this row alone: {fault}")
