"""The vLLM engine: ``vllm.LLM`` with continuous input.

``LLM.generate`` takes a list, renders all of it on one thread, and fails the whole call for one bad prompt. Here, a
separate thread renders requests, and they are added one by one while the LLM's engine runs. The batch stays full, and a
refused request fails only its own row.
"""

from __future__ import annotations

import itertools
import os
import queue
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from batchkit.config.tables import JobConfig
from batchkit.engines.base import BURST_GAP_S, EngineLoad
from batchkit.engines.faults import EngineDied, Fault, StartFailed
from batchkit.engines.memory import HostMemory
from batchkit.engines.process.launcher import SCRATCH
from batchkit.engines.process.startup import explain
from batchkit.engines.request_checks import cause
from batchkit.engines.vllm.loras import Loras
from batchkit.engines.vllm.options import check_task, limits_of, llm_options
from batchkit.engines.vllm.pooling import PoolingRenderer
from batchkit.engines.vllm.renderer import EngineInput, Prepared, VllmRenderer, refusal
from batchkit.engines.vllm.speech import timestamp_options
from batchkit.engines.vllm.stepper import Stepper
from batchkit.errors import EngineError, JobError, RequestError, RowError, RowTimeoutError
from batchkit.types import Completion, Request

if TYPE_CHECKING:
    from batchkit.engines.vllm.core import CoreWatch

_STUCK_CHECK_S = 1.0
_TOKEN_LOOK_S = 0.25
_MOST_TRIES = 3  # attempts to prepare a request again if the engine has dropped its images


class _Unprepared(NamedTuple):
    """A request to prepare.

    - ``unknown_images``: hashes of images that vLLM's renderer wrongly assumes to be in the engine's cache.
    - ``tries``: number of earlier attempts to prepare the request.
    """

    request: Request
    unknown_images: Sequence[str] = ()
    tries: int = 0


class VllmEngine:
    """An engine that adds requests to ``vllm.LLM`` one by one while others run.

    Threads: the processor's thread calls every method and runs the forward passes. A second thread renders the requests
    that ``submit`` queued. They exchange requests only through ``_inbox`` and ``_prepared``. Once the model is loaded,
    only the second thread uses vLLM's renderer.
    """

    def __init__(self, job: JobConfig, vllm_config: Any) -> None:
        import vllm

        self._row_timeout_s = job.run.row_timeout_s
        self._host_memory = HostMemory(job)
        self._next_token_look = 0.0
        self._unfinished_tokens = 0
        self.versions = {"vllm": vllm.__version__}
        self._watch, self._llm = _load(job, vllm_config)
        self._engine = self._llm.llm_engine
        self.versions["dtype"] = str(self._llm.model_config.dtype).removeprefix("torch.")
        self._loras = _loras_of(job, self._llm, self._watch)
        self.limits = limits_of(self._engine.vllm_config)
        self.max_num_seqs: int = self.limits["max_num_seqs"]
        self._renderer = _renderer_of(job, self._llm)
        self._stepper = Stepper(self._engine, meanwhile=self._while_the_device_works)
        self._inbox: queue.SimpleQueue[_Unprepared | None] = queue.SimpleQueue()
        self._prepared: queue.SimpleQueue[Prepared | Completion] = queue.SimpleQueue()
        self._preparing = 0
        self._rendering: tuple[Request, float] | None = None
        self._closing = False
        self._failed = False
        self._death: EngineDied | None = None
        self._done: list[Completion] = []
        # Finished but not parsed requests. They are parsed while the device runs the next forward pass, because
        # parsing long reasoning would delay that pass by milliseconds.
        self._ended: list[_Running] = []
        self._running: dict[str, _Running] = {}
        # By id(): aborted requests that other parts may still hold.
        self._aborted: dict[int, Request] = {}
        self._numbers = itertools.count()
        self._next_stuck_check = time.monotonic() + _STUCK_CHECK_S
        # vLLM's number of a scheduled request -> its token count at the last check, and the time of its last token.
        self._progress: dict[str, tuple[int, float]] = {}
        self._thread = threading.Thread(target=self._prepare, name="vllm-render", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        self._queue(_Unprepared(request))

    def _queue(self, unprepared: _Unprepared) -> None:
        self._preparing += 1
        self._inbox.put(unprepared)

    def poll(self, timeout_s: float) -> Sequence[Completion]:
        self._check_rendering()
        if self._death is not None:
            raise self._death
        deadline = time.monotonic() + timeout_s
        if not self._running:
            self._admit_burst(timeout_s)
        while (self._running or self._ended) and not self._done:
            if len(self._running) < self.max_num_seqs:
                self._admit()  # with a full batch, requests can wait until the device works
            if self._running:
                self._step()
            else:
                self._complete()
            if not self._done:  # return finished requests first
                self._abort_stuck()
            if time.monotonic() >= deadline:
                break
        done, self._done = self._done, []
        return [completion for completion in done if not self._pop_aborted(completion)]

    def abort(self, requests: Sequence[Request]) -> None:
        self._aborted |= {id(request): request for request in requests}
        running = {
            id(one): one for one in self._running.values() if self._pop_aborted(one.prepared)
        }
        for one in running.values():
            self._drop(one)
        self._stepper.forget_aborted()

    def load(self) -> EngineLoad:
        return self._stepper.load()._replace(
            host_bytes=self._host_memory.bytes_of(os.getpid()),
            unfinished_tokens=self._count_unfinished(),
        )

    def _count_unfinished(self) -> int:
        """Return the number of output tokens of the running requests.

        The tokens are counted a few times a second. Between two counts, the tokens of requests that have finished are
        subtracted.
        """
        now = time.monotonic()
        if now >= self._next_token_look:
            self._next_token_look = now + _TOKEN_LOOK_S
            self._unfinished_tokens = sum(self._stepper.tokens().values())
        return max(0, self._unfinished_tokens)

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._inbox.put(None)
        if not self._failed:
            self._engine.abort_request(list(self._running))
        self._running.clear()
        self._thread.join(timeout=10)
        self._engine.engine_core.shutdown()
        self._watch.close()
        self._loras.close()
        del self._llm, self._engine, self._loras
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()

    def _prepare(self) -> None:
        while (unprepared := self._inbox.get()) is not None:
            request = unprepared.request
            self._rendering = (request, time.monotonic())
            try:
                self._renderer.forget(unprepared.unknown_images)
                prepared = self._renderer.prepare(request)
                self._prepared.put(prepared._replace(tries=unprepared.tries + 1))
            except RowError as error:
                self._prepared.put(Completion(request, error=error))
            except Exception as error:  # if this thread died, its requests would never come back
                self._prepared.put(Completion(request, error=RequestError(cause(error))))
            self._rendering = None
            if self._closing:
                return

    def _check_rendering(self) -> None:
        """Raise EngineDied if rendering hangs, because the thread can't be stopped and later requests would wait
        forever."""
        rendering = self._rendering
        if rendering is None:
            return
        request, since = rendering
        took_s = time.monotonic() - since
        if took_s > self._row_timeout_s:
            message = (
                f"not ready after {took_s:.0f} s (run.row_timeout_s = {self._row_timeout_s:g})"
            )
            fault = Fault("timeout", "preparing the prompt", message)
            raise EngineDied(fault, request=request)

    def _admit_burst(self, timeout_s: float) -> None:
        """Wait for a request, and for others that follow within milliseconds, then add all of them to the engine.

        Otherwise the first request would start alone, and the others would wait until its forward pass ends.
        """
        self._admit(timeout_s)
        while self._preparing and len(self._running) < self.max_num_seqs:
            running = len(self._running)
            self._admit(BURST_GAP_S)
            if len(self._running) == running:
                break

    def _admit(self, wait_s: float = 0) -> None:
        """Add prepared requests to the engine. A request that can't be prepared or is refused becomes a failed
        completion.

        ``wait_s``: how long to wait for the first request.
        """
        while self._preparing:
            try:
                prepared = self._prepared.get(wait_s > 0, wait_s or None)
            except queue.Empty:
                break
            wait_s = 0
            self._preparing -= 1
            if self._pop_aborted(prepared):
                continue
            if isinstance(prepared, Completion):
                self._done.append(prepared)
            elif (error := self._add(prepared)) is not None:
                self._done.append(Completion(prepared.request, error=error))

    def _add(self, prepared: Prepared) -> RowError | None:
        from vllm.exceptions import VLLMValidationError

        running = _Running(prepared, [str(next(self._numbers)) for _ in prepared.inputs])
        for number, one in zip(running.numbers, prepared.inputs, strict=True):
            try:
                self._add_input(number, one, prepared)
            except VLLMValidationError as error:
                self._engine.abort_request(running.numbers)
                return refusal(error)
            except Exception as error:
                # No forward pass has run, so the error concerns only this row.
                self._engine.abort_request(running.numbers)
                unknown = unknown_images(error, one.prompt)
                if not unknown or prepared.tries > _MOST_TRIES:
                    return RequestError(cause(error))
                self._queue(_Unprepared(prepared.request, unknown, prepared.tries))
                return None
        self._running.update(dict.fromkeys(running.numbers, running))
        return None

    def _add_input(self, number: str, one: EngineInput, prepared: Prepared) -> None:
        prompt, params = one
        parser, lora = prepared.parser, self._loras.of(prepared.request)
        if parser is None or params.structured_outputs is None:
            self._engine.add_request(number, prompt, params, lora_request=lora)
            return
        request = self._engine.input_processor.process_inputs(
            number,
            prompt,
            params,
            supported_tasks=self._engine.get_supported_tasks(),
            lora_request=lora,
        )
        parser.open_grammar(request)
        self._engine.add_request(number, request, params, prompt_text=prompt.get("prompt"))

    def _while_the_device_works(self) -> None:
        self._complete()
        self._admit()

    def _step(self) -> None:
        try:
            outputs = self._stepper.step()
        except Exception as error:
            # After an error in the forward pass, the engine's state can't be trusted.
            self._failed = True
            self._complete()
            self._death = EngineDied(self._watch.fault_of(error, self._llm))
            if self._done:
                return
            raise self._death from error
        for output in outputs:
            if output.finished:
                self._end(output)

    def _end(self, output: Any) -> None:
        running = self._running.pop(output.request_id)
        running.outputs[output.request_id] = output
        if len(running.outputs) < len(running.numbers):
            return
        if _is_refused(running.prepared, output):
            self._refuse(running.prepared)
            return
        running.took_s = time.monotonic() - running.since
        self._ended.append(running)
        if running.prepared.parser is None:
            self._complete()

    def _refuse(self, prepared: Prepared) -> None:
        """Handle a request that vLLM's engine refused. Only the core's log has the reason.

        A request with images is prepared again, a few times, because an image may be missing in the engine's cache.
        Otherwise the request fails.
        """
        images = _images_of(prepared.inputs[0].prompt)
        if images and prepared.tries <= _MOST_TRIES:
            self._queue(_Unprepared(prepared.request, images, prepared.tries))
            return
        error = RequestError("vLLM's engine refused the request; engine.log has the reason")
        self._done.append(Completion(prepared.request, error=error))

    def _complete(self) -> None:
        ended, self._ended = self._ended, []
        for one in ended:
            outputs = [one.outputs[number] for number in one.numbers]
            completion = self._renderer.completion(one.prepared, outputs, one.took_s)
            if completion.usage is not None:
                self._unfinished_tokens -= completion.usage.completion_tokens
            self._done.append(completion)

    def _abort_stuck(self) -> None:
        """Abort running requests that got no token for ``run.row_timeout_s``.

        vLLM runs requests in the order of their arrival, so only the oldest requests are checked. With ``n > 1``, one
        request has several entries in vLLM's scheduler.
        """
        now = time.monotonic()
        if now < self._next_stuck_check:
            return
        self._next_stuck_check = now + _STUCK_CHECK_S
        before, self._progress = self._progress, {}
        states = self._engine.output_processor.request_states
        stuck: dict[str, tuple[int, float]] = {}
        tokens_of = self._stepper.tokens().items()
        for internal, tokens in itertools.islice(tokens_of, self._stepper.running):
            known, since = before.get(internal, (-1, now))
            if tokens != known:
                since = now
            self._progress[internal] = tokens, since
            if now - since > self._row_timeout_s:
                state = states[internal]
                stuck[(state.parent_req or state).external_req_id] = tokens, now - since
        for number, (tokens, silence_s) in stuck.items():
            if number in self._running:  # otherwise it was aborted with another choice of its row
                self._abort(self._running[number], tokens, silence_s)

    def _pop_aborted(self, found: Prepared | Completion) -> bool:
        """Return whether the request was aborted, and remove it from the aborted requests."""
        return self._aborted.pop(id(found.request), None) is not None

    def _drop(self, running: _Running) -> None:
        self._engine.abort_request(running.numbers)
        for number in running.numbers:
            self._running.pop(number, None)

    def _abort(self, running: _Running, tokens: int, silence_s: float) -> None:
        self._drop(running)
        self._stepper.forget_aborted()
        error = RowTimeoutError(
            f"no token for {silence_s:.0f} s (run.row_timeout_s = {self._row_timeout_s:g}),"
            f" after {tokens} tokens"
        )
        latency_s = time.monotonic() - running.since
        self._done.append(Completion(running.prepared.request, latency_s=latency_s, error=error))


@dataclass(slots=True)
class _Running:
    """A request in vLLM's engine.

    - ``numbers``: vLLM's ids of the request's inputs.
    - ``outputs``: outputs of the finished inputs, by id.
    - ``since``: time at which the request was added (``time.monotonic()``).
    - ``took_s``: seconds from then until all inputs were finished; 0 before.
    """

    prepared: Prepared
    numbers: list[str]
    outputs: dict[str, Any] = field(default_factory=dict)
    since: float = field(default_factory=time.monotonic)
    took_s: float = 0.0


def _load(job: JobConfig, vllm_config: Any) -> tuple[CoreWatch, Any]:
    import vllm

    from batchkit.engines.vllm.core import CoreWatch

    if SCRATCH in os.environ:  # vLLM leaves files behind; this folder is deleted with the process
        tempfile.tempdir = os.environ[SCRATCH]
    limits = limits_of(vllm_config)
    watch = CoreWatch(limits["max_num_seqs"])
    options = llm_options(job) | timestamp_options(job, vllm_config.model_config)
    try:
        llm = vllm.LLM(**options)
    except Exception as error:
        # Loading runs the model's code and device drivers, which may raise any exception.
        fault = watch.fault_of(error)
        message = explain(error, job.engine.model, str(fault))
        raise StartFailed(message, fault, limits) from error
    if not job.generates:
        try:
            check_task(job, llm.pooling_task, llm.model_config)
        except JobError:
            llm.llm_engine.engine_core.shutdown()
            raise
    return watch, llm


def _loras_of(job: JobConfig, llm: Any, watch: CoreWatch) -> Loras:
    try:
        return Loras(job, llm)
    except EngineError as error:
        llm.llm_engine.engine_core.shutdown()
        limits = limits_of(llm.llm_engine.vllm_config)
        raise StartFailed(str(error), watch.fault_of(error, llm), limits) from error


def _renderer_of(job: JobConfig, llm: Any) -> VllmRenderer | PoolingRenderer:
    config = llm.llm_engine.vllm_config
    if job.generates:
        return VllmRenderer(job, llm.llm_engine.renderer, config)
    return PoolingRenderer(job, llm.llm_engine.renderer, config, llm.pooling_io_processors)


def _is_refused(prepared: Prepared, output: Any) -> bool:
    params = prepared.inputs[0].params
    if getattr(params, "structured_outputs", None) is not None or not isinstance(
        output.outputs, list
    ):
        return False  # a grammar may end an answer this way; pooling reports its own errors
    return any(choice.finish_reason == "error" for choice in output.outputs)


def _images_of(prompt: Mapping[str, Any]) -> Sequence[str]:
    return [image for hashes in prompt.get("mm_hashes", {}).values() for image in hashes]


def unknown_images(error: Any, prompt: Mapping[str, Any]) -> Sequence[str]:
    """Return the hashes of images that vLLM expected in its cache; empty if ``error`` has another cause."""
    if isinstance(error, AssertionError) and "Expected a cached item" in str(error):  # vLLM 0.26
        return _images_of(prompt)
    missing: Sequence[str] = getattr(error, "mm_hashes", ())  # MultiModalCacheMissError
    return missing
