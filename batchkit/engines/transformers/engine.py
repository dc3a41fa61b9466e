"""The engine: it loads the model, runs static batches, and recovers from failed ones."""

from __future__ import annotations

import gc
import logging
import os
import random
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from batchkit.config.tables import JobConfig
from batchkit.engines.base import EngineLoad
from batchkit.engines.faults import EngineDied, Fault, StartFailed, fault_of
from batchkit.engines.memory import HostMemory
from batchkit.engines.process.startup import explain
from batchkit.engines.transformers.batch import Batch, BatchAnswer, LoadedModel, next_batch
from batchkit.engines.transformers.options import TransformersOptions
from batchkit.engines.transformers.rendering import PreparedPrompt, TransformersRenderer
from batchkit.errors import EngineCrashError, RequestError, RowError, RowOutOfMemoryError
from batchkit.types import Completion, Request, Usage

_STRETCH = 100  # answers before a reduced batch size is doubled
FLASH = "flash_attention_2"
_LOG = logging.getLogger(__name__)  # warnings reach stderr, which is engine.log
# The model's Python code raises these for inputs that it can't take; torch raises RuntimeError.
_REFUSALS = (ValueError, TypeError, LookupError, AssertionError, NotImplementedError)


class TransformersEngine:
    """The transformers engine. Its one thread prepares the submitted requests, then runs a forward pass of the current
    batch.

    Each forward pass gives every row of the batch a token, so a single row can't hang (``run.row_timeout_s`` is not
    used). ``run.stall_timeout_s`` catches a forward pass that hangs.

    When memory runs out, the batch is halved and started again. When a batch fails for another reason, its rows run one
    by one, so that only the row at fault fails.
    """

    def __init__(
        self, job: JobConfig, options: TransformersOptions, renderer: TransformersRenderer
    ) -> None:
        import torch
        import transformers

        self.max_num_seqs = options.max_num_seqs
        self.limits = {"max_num_seqs": options.max_num_seqs}
        self._options, self._renderer = options, renderer
        self._seed = job.run.seed
        self._loaded = load_model(job, options, renderer.config, renderer.tokenizer)
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        self.versions["dtype"] = str(self._loaded.model.dtype).removeprefix("torch.")
        self._host_memory = HostMemory(job)
        self._submitted: deque[tuple[Request, float]] = deque()
        self._waiting: list[BatchAnswer] = []  # answers that run alone come first
        self._batch: Batch | None = None
        self._size = self._size_that_worked = options.max_num_seqs
        self._successes = 0

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

    def abort(self, requests: Sequence[Request]) -> None:
        """Do nothing: the requests are computed anyway."""

    def load(self) -> EngineLoad:
        running = len(self._batch.unfinished) if self._batch is not None else 0
        waiting = len(self._submitted) + len(self._waiting)
        return EngineLoad(running, waiting, 0.0, 0, self._host_memory.bytes_of(os.getpid()))

    def close(self) -> None:
        self._submitted.clear()
        self._waiting.clear()
        self._end_batch()
        if hasattr(self, "_loaded"):
            del self._loaded
            free_memory()

    def _prepare(self, request: Request, since: float) -> list[Completion]:
        """Tokenize a request and queue its answers. Return the failed completion if it is refused, otherwise []."""
        try:
            prepared = self._renderer.prepare(request)
        except RowError as error:
            return [Completion(request, error=error)]
        answers = [
            BatchAnswer(
                prepared, self._seed_of(prepared, n), self._renderer.tokenizer, self._loaded.eos_ids
            )
            for n in range(prepared.sampling.n)
        ]
        for answer in answers:
            answer.since, answer.siblings = since, answers
        self._waiting += answers
        return []

    def _seed_of(self, prepared: PreparedPrompt, number: int) -> int:
        if (own := prepared.sampling.seed) is not None:
            return own + number
        request = prepared.request
        name = f"{self._seed}/{request.row.index}/{request.attempt}/{number}"
        return random.Random(name).getrandbits(63)

    def _begin(self) -> Batch:
        """Make the next batch from waiting answers."""
        answers = next_batch(self._waiting, self._size)
        self._waiting = _without(self._waiting, answers)
        self._batch = Batch(answers, self._loaded)
        return self._batch

    def _step(self, batch: Batch) -> list[Completion]:
        """Run one forward pass of the batch, and return the requests whose answers have all ended."""
        unfinished = batch.unfinished
        try:
            ended = batch.step()
        except Exception as error:  # the model's own code, and the device's libraries
            # Don't keep the error itself, because its frames hold tensors.
            fault, is_refusal = fault_of(error), isinstance(error, _REFUSALS)
        else:
            if not batch.unfinished:
                self._count_success(batch)
                self._end_batch()
            siblings = {id(answer.siblings): answer.siblings for answer in ended}
            return [_completion(answers) for answers in siblings.values() if _are_finished(answers)]
        return self._recover(batch, unfinished, fault, is_refusal=is_refusal)

    def _count_success(self, batch: Batch) -> None:
        self._size_that_worked = self._size
        self._successes += len(batch.answers)
        if self._successes >= _STRETCH and self._size < self.max_num_seqs:
            self._successes, self._size = 0, min(2 * self._size, self.max_num_seqs)
            _LOG.warning(
                "%d answers without an error: batches may have up to %d rows again",
                _STRETCH,
                self._size,
            )

    def _end_batch(self) -> None:
        if self._batch is not None:
            self._batch.end()
            self._batch = None

    def _recover(
        self, batch: Batch, unfinished: Sequence[BatchAnswer], fault: Fault, *, is_refusal: bool
    ) -> list[Completion]:
        """Queue the ``unfinished`` answers of a failed batch again. If the batch had only one request, return it as
        failed. Raises EngineDied if the engine cannot recover."""
        is_oom, size = fault.kind == "oom", len(batch.answers)
        self._end_batch()
        free_memory()
        if not (self._options.shrink_on_oom if is_oom else is_sound(self._loaded.device)):
            raise EngineDied(fault)
        if size == 1:
            self._size = self._size_that_worked  # one failed row says nothing about the batch size
            answer = unfinished[0]
            self._waiting = _without(self._waiting, answer.siblings)
            latency_s = time.monotonic() - answer.since
            error = _row_error(fault, is_refusal=is_refusal)
            return [Completion(answer.prepared.request, latency_s=latency_s, error=error)]
        if is_oom:
            self._successes, self._size = 0, size // 2
            _LOG.warning("out of memory (%s): batches now have up to %d rows", fault, self._size)
        else:
            _LOG.warning("a batch failed (%s): running its rows one by one", fault)
            for answer in unfinished:
                answer.runs_alone = True
        self._waiting = [*unfinished, *self._waiting]
        return []


def _without(waiting: Iterable[BatchAnswer], gone: Iterable[BatchAnswer]) -> list[BatchAnswer]:
    left_out = set(map(id, gone))
    return [answer for answer in waiting if id(answer) not in left_out]


def _are_finished(answers: Iterable[BatchAnswer]) -> bool:
    return all(answer.finish_reason is not None for answer in answers)


def _completion(answers: Sequence[BatchAnswer]) -> Completion:
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
        return RowOutOfMemoryError(
            f"the engine runs out of memory even if this row runs alone: {fault}"
        )
    if is_refusal:
        return RequestError(f"the model can't take this row: {fault}")
    return EngineCrashError(f"the model fails even if this row runs alone: {fault}")


def load_model(
    job: JobConfig, options: TransformersOptions, config: Any, tokenizer: Any
) -> LoadedModel:
    """Load the model on a GPU, or on the CPU if there is no GPU. The option ``device_map`` overrides this. Raises
    StartFailed if the model cannot be loaded."""
    import torch
    from transformers import GenerationConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # it would fill engine.log
    placed = {
        "device_map": options.device_map,
        "attn_implementation": _attention(options.attn_implementation),
    }
    try:
        model = _class_for(config).from_pretrained(
            job.engine.model_source,
            dtype=options.dtype,
            revision=options.revision or "main",
            trust_remote_code=options.trust_remote_code,
            **{name: value for name, value in placed.items() if value is not None},
        )
        if job.engine.lora is not None:
            model.load_adapter(job.engine.lora)
        if not options.device_map:
            model.to("cuda" if torch.cuda.is_available() else "cpu")
    except Exception as error:
        # Loading runs the model's code and the device's drivers, which may raise any type.
        limits = {"max_num_seqs": options.max_num_seqs}
        raise StartFailed(explain(error, job.engine.model), fault_of(error), limits) from error
    own = model.generation_config
    # Otherwise the model's own temperature and penalties would apply in addition to those of the rows.
    model.generation_config = GenerationConfig()
    listed = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
    ends = frozenset(n for n in [*listed, tokenizer.eos_token_id] if n is not None)
    # Any token will do if none is set, because padding is masked.
    pads = [n for n in (own.pad_token_id, tokenizer.pad_token_id, 0) if n is not None]
    return LoadedModel(model.eval(), model.get_input_embeddings().weight.device, ends, pads[0])


def free_memory() -> None:
    """Release memory that is no longer referenced."""
    import torch

    gc.collect()  # an error and its frames, which hold tensors, refer to each other
    torch.cuda.empty_cache()  # does nothing if no GPU is in use


def is_sound(device: Any) -> bool:
    """Return whether the device still computes: after some errors, a GPU fails at every later operation."""
    import torch

    try:
        return bool(torch.ones(1, device=device).add(1).item() == 2)
    except RuntimeError:
        return False


def _class_for(config: Any) -> Any:
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING as WITH_IMAGES
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    is_remote = AutoModelForImageTextToText.__name__ in (getattr(config, "auto_map", None) or {})
    return (
        AutoModelForImageTextToText
        if is_remote or type(config) in WITH_IMAGES
        else AutoModelForCausalLM
    )


def _attention(wanted: str | None) -> str | None:
    from transformers.utils import is_flash_attn_2_available

    if wanted != FLASH or is_flash_attn_2_available():
        return wanted
    _LOG.warning(
        "engine.options.attn_implementation: %s needs a package that is not installed; using the default",
        FLASH,
    )
    return None
