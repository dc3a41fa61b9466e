"""The vLLM engine: ``vllm.LLM``, fed continuously. The only file that touches vLLM.

``LLM.generate`` takes a list, renders all of it on one thread, and fails the whole call for one bad
prompt. Here requests are rendered on a separate thread and added one by one to the LLM's engine
while it steps, so that its batch stays full and a refused request is only that row's error.

vLLM runs inside this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``): errors keep their types, and
the scheduler's statistics can be read after each step.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

from batchkit.config.tables import JobConfig
from batchkit.engines.base import BURST_GAP_S, EngineLoad, RenderedPrompt
from batchkit.engines.faults import EngineDied, Fault, StartFailed, fault_of
from batchkit.engines.host_memory import family_bytes
from batchkit.engines.process.launcher import SCRATCH
from batchkit.engines.process.startup import explain
from batchkit.engines.request_checks import cause, chat_template, check_length, missing_folder, near
from batchkit.errors import (
    JobError,
    MediaError,
    PromptTooLongError,
    RequestError,
    RowError,
    RowTimeoutError,
)
from batchkit.types import Choice, Completion, Request, Usage

# The image cache keeps processed pixels of images that are used again. Rows that share an image
# are close together, so a small cache is enough; vLLM's default of 4 GiB would only fill up.
_DEFAULTS = {"mm_processor_cache_gb": 0.25, "use_tqdm_on_load": False}
# On a CPU vLLM would claim nine tenths of the host's memory, and refuse to start with less.
_CPU_KV_CACHE_BYTES = 2 * 2**30
_MEMORY_OPTIONS = ("kv_cache_memory_bytes", "gpu_memory_utilization")
_QUIET = "CRITICAL"
_TOO_LONG = ("input_tokens", "input_text")
_STUCK_CHECK_S = _MEMORY_LOOK_S = 1.0
_MOST_TRIES = 3  # retries of preparing a request whose images the engine lacks


def preload() -> None:
    """Import what vLLM itself imports before it forks its engine, without starting a device.

    What vLLM logs goes to a file here; a worker process's error appears nowhere else.
    """
    if os.environ.get("VLLM_LOGGING_LEVEL") == _QUIET:
        del os.environ["VLLM_LOGGING_LEVEL"]  # set below in the run's own process, for its terminal
    _set_environment("ERROR")
    import vllm.engine.arg_utils
    import vllm.entrypoints.llm
    import vllm.v1.engine.core  # noqa: F401


def open_preflight(job: JobConfig) -> VllmRenderer:
    """Checks options and sampling with vLLM's classes; needs the model's config and tokenizer.

    Raises:
        JobError: an option or a sampling parameter is wrong, or the model's files are missing.
    """
    vllm_config = _check_config(job)
    from vllm.renderers import renderer_from_config

    return VllmRenderer(job, renderer_from_config(vllm_config), vllm_config)


def open_engine(job: JobConfig) -> VllmEngine:
    """Loads the model.

    Raises:
        JobError: an option or a sampling parameter is wrong, or the model's files are missing.
        StartFailed: the model can't be loaded.
    """
    return VllmEngine(job, _check_config(job))


class _Unprepared(NamedTuple):
    """A request, and its images that vLLM's renderer wrongly assumes the engine has.

    ``tries``: how often it was prepared before.
    """

    request: Request
    unknown_images: Sequence[str] = ()
    tries: int = 0


class _Prepared(NamedTuple):
    """A request in vLLM's own shape."""

    request: Request
    prompt: Any
    params: Any
    tries: int = 0


class VllmRenderer:
    """Turns requests into vLLM's inputs: chat template, tokenizer, image processor. One thread."""

    def __init__(self, job: JobConfig, renderer: Any, vllm_config: Any) -> None:
        from vllm.renderers import ChatParams

        self._renderer = renderer
        self._model_config = vllm_config.model_config
        self._max_model_len: int = self._model_config.max_model_len
        self._is_limited = job.retry.on_too_long == "fail"  # else a cut needs the full count
        self._chat_params = ChatParams(
            chat_template=chat_template(job.engine.options),
            chat_template_kwargs={
                "add_generation_prompt": True,
                "continue_final_message": False,
                "tools": None,
                "tokenize": False,
                **job.prompt.chat_template_kwargs,
            },
        )

    def render(self, request: Request) -> RenderedPrompt:
        prepared = self.prepare(request)
        tokens = prepared.prompt.get("prompt_token_ids") or ()
        text = prepared.prompt.get("prompt") or self._renderer.get_tokenizer().decode(tokens)
        return RenderedPrompt(text, len(tokens))

    def prepare(self, request: Request) -> _Prepared:
        """The request with its prompt tokenised and its images processed.

        Raises:
            RowError: vLLM refuses it.
        """
        from vllm.exceptions import VLLMValidationError

        params = sampling_params(request.sampling)
        try:
            prompt = self._prompt(request)
        except VLLMValidationError as error:
            raise _refusal(error) from error
        except Exception as error:
            # The model's own processor runs here, and may raise anything for an unusual image.
            kind = MediaError if request.media_bytes else RequestError
            raise kind(cause(error)) from error
        check_length(request, len(prompt.get("prompt_token_ids") or ()), self._max_model_len)
        return _Prepared(request, prompt, params)

    def forget(self, images: Iterable[str]) -> None:
        """Send these images (given by their hashes) in full when they are used next.

        vLLM's renderer sends an image once; if that prompt was refused before it reached the
        engine, all later prompts refer to an image that the engine never got.
        """
        cache = self._renderer.mm_processor_cache
        for image in images:
            if hasattr(cache, "invalidate"):
                cache.invalidate(image)
            else:  # vLLM 0.26
                cache._cache.pop(image, None)

    def _prompt(self, request: Request) -> Any:
        from vllm.renderers.inputs.preprocess import parse_model_prompt

        if request.messages is None:
            parsed = parse_model_prompt(self._model_config, {"prompt": request.prompt})
            tokenization = self._counting_all(self._renderer.default_cmpl_tok_params)
            return self._renderer.render_cmpl([parsed], tokenization)[0]
        tokenization = self._counting_all(
            self._renderer.default_chat_tok_params.with_kwargs(add_special_tokens=False)
        )
        conversation = [dict(message) for message in request.messages]
        _, prompts = self._renderer.render_chat([conversation], self._chat_params, tokenization)
        return prompts[0]

    def _counting_all(self, tokenization: Any) -> Any:
        """vLLM stops counting at its limit, which is enough to refuse a prompt but not to cut it."""
        return tokenization if self._is_limited else replace(tokenization, max_total_tokens=None)


class VllmEngine:
    """``vllm.LLM``, fed continuously.

    Threads: the processor's thread calls every method and steps the engine; one thread of ours
    renders what ``submit`` queued. They exchange requests only by ``_inbox`` and ``_prepared``;
    once the model is loaded, only the second thread uses vLLM's renderer.
    """

    def __init__(self, job: JobConfig, vllm_config: Any) -> None:
        import vllm

        self._row_timeout_s = job.run.row_timeout_s
        self._is_memory_limited = job.run.max_host_gb is not None
        self._host_memory = 0
        self._next_memory_look = 0.0
        self._versions = {"vllm": vllm.__version__}
        self._llm = _load(job, _limits(vllm_config))
        self._engine = self._llm.llm_engine
        self._lora = _lora_request(job)
        config = self._engine.vllm_config
        self._limits = _limits(config)
        self._renderer = VllmRenderer(job, self._engine.renderer, config)
        self._stats = _follow_stats(self._engine)
        self._inbox: queue.SimpleQueue[_Unprepared | None] = queue.SimpleQueue()
        self._prepared: queue.SimpleQueue[_Prepared | Completion] = queue.SimpleQueue()
        self._preparing = 0
        self._rendering: tuple[Request, float] | None = None
        self._closing = False
        self._failed = False
        self._running: dict[str, _Running] = {}
        self._numbers = iter(range(2**62))
        self._next_stuck_check = time.monotonic() + _STUCK_CHECK_S
        self._thread = threading.Thread(target=self._prepare, name="vllm-render", daemon=True)
        self._thread.start()

    @property
    def max_num_seqs(self) -> int:
        seqs: int = self._limits["max_num_seqs"]
        return seqs

    @property
    def limits(self) -> Mapping[str, Any]:
        return self._limits

    @property
    def versions(self) -> Mapping[str, str]:
        return self._versions

    def submit(self, request: Request) -> None:
        self._queue(_Unprepared(request))

    def _queue(self, unprepared: _Unprepared) -> None:
        self._preparing += 1
        self._inbox.put(unprepared)

    def poll(self, timeout_s: float) -> Sequence[Completion]:
        self._check_rendering()
        deadline = time.monotonic() + timeout_s
        done = self._admit(wait_s=0) if self._running else self._admit_burst(timeout_s)
        while self._running and not done:
            # What a step returned is paid for: it is handed on before anything else is tried.
            done = self._step() or self._abort_stuck() or self._admit(wait_s=0)
            if time.monotonic() >= deadline:
                break
        return done

    def load(self) -> EngineLoad:
        return self._stats.load()._replace(host_bytes=self._host_bytes())

    def _host_bytes(self) -> int:
        """Memory of this process and its workers, read once a second, and only if it is limited."""
        if not self._is_memory_limited:
            return 0
        now = time.monotonic()
        if now >= self._next_memory_look:
            self._next_memory_look = now + _MEMORY_LOOK_S
            self._host_memory = family_bytes(os.getpid())
        return self._host_memory

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
        del self._llm, self._engine
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
            except Exception as error:  # a dead thread would leave its requests waiting forever
                self._prepared.put(Completion(request, error=RequestError(cause(error))))
            self._rendering = None
            if self._closing:
                return

    def _check_rendering(self) -> None:
        """A thread that hangs can't be ended, and later requests would wait for it forever."""
        rendering = self._rendering
        if rendering is None:
            return
        request, since = rendering
        took_s = time.monotonic() - since
        if took_s > self._row_timeout_s:
            message = f"no end for {took_s:.0f} s (run.row_timeout_s = {self._row_timeout_s:g})"
            fault = Fault("timeout", "preparing its prompt", message)
            raise EngineDied(fault, request=request)

    def _admit_burst(self, timeout_s: float) -> list[Completion]:
        """Wait for the first request, and for those right behind it.

        A step with only the first would make the others wait until it ends, and the batch would not
        start full.
        """
        refused = self._admit(timeout_s)
        while self._preparing and len(self._running) < self.max_num_seqs:
            running = len(self._running)
            refused += self._admit(BURST_GAP_S)
            if len(self._running) == running:
                break
        return refused

    def _admit(self, wait_s: float) -> list[Completion]:
        """Add prepared requests to the engine; returns those that failed or were refused."""
        refused: list[Completion] = []
        while self._preparing:
            try:
                prepared = self._prepared.get(wait_s > 0, wait_s or None)
            except queue.Empty:
                break
            wait_s = 0
            self._preparing -= 1
            if isinstance(prepared, Completion):
                refused.append(prepared)
            elif (error := self._add(prepared)) is not None:
                refused.append(Completion(prepared.request, error=error))
        return refused

    def _add(self, prepared: _Prepared) -> RowError | None:
        from vllm.exceptions import VLLMValidationError

        number = str(next(self._numbers))
        try:
            self._engine.add_request(
                number, prepared.prompt, prepared.params, lora_request=self._lora
            )
        except VLLMValidationError as error:
            return _refusal(error)
        except Exception as error:  # no forward pass has run: any error is the row's own
            self._engine.abort_request([number])
            unknown = _unknown_images(error, prepared.prompt)
            if not unknown or prepared.tries > _MOST_TRIES:
                return RequestError(cause(error))
            self._queue(_Unprepared(prepared.request, unknown, prepared.tries))
            return None
        self._running[number] = _Running(prepared.request)
        return None

    def _step(self) -> list[Completion]:
        try:
            outputs = self._engine.step()
        except Exception as error:
            # After any error in the forward pass, the engine's state can't be trusted.
            self._failed = True
            raise EngineDied(fault_of(error)) from error
        return [self._completion(output) for output in outputs if output.finished]

    def _completion(self, output: Any) -> Completion:
        running = self._running.pop(output.request_id)
        choices = [
            Choice(c.text, c.finish_reason, _logprobs(c.logprobs, c.token_ids))
            for c in output.outputs
        ]
        usage = Usage(
            len(output.prompt_token_ids or ()), sum(len(c.token_ids) for c in output.outputs)
        )
        latency_s = time.monotonic() - running.since
        return Completion(running.request, choices, usage, latency_s, prompt=output.prompt)

    def _abort_stuck(self) -> list[Completion]:
        """Abort requests that were scheduled and then got no token for ``run.row_timeout_s``."""
        now = time.monotonic()
        if now < self._next_stuck_check:
            return []
        self._next_stuck_check = now + _STUCK_CHECK_S
        stuck = []
        for number, tokens in self._scheduled().items():
            running = self._running[number]
            running.saw(tokens, now)
            if now - running.last_token_at > self._row_timeout_s:
                stuck.append(number)
        self._engine.abort_request(stuck)
        return [self._timed_out(self._running.pop(number), now) for number in stuck]

    def _scheduled(self) -> Counter[str]:
        """Tokens so far of each request that is not waiting to be scheduled.

        With ``n > 1``, several of the scheduler's requests belong to one of ours.
        """
        from vllm.v1.request import RequestStatus

        tokens: Counter[str] = Counter()
        states = self._engine.output_processor.request_states
        for internal, request in self._engine.engine_core.engine_core.scheduler.requests.items():
            if request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
                state = states[internal]
                tokens[(state.parent_req or state).external_req_id] += request.num_output_tokens
        return tokens

    def _timed_out(self, running: _Running, now: float) -> Completion:
        error = RowTimeoutError(
            f"no token for {now - running.last_token_at:.0f} s"
            f" (run.row_timeout_s = {self._row_timeout_s:g}), {running.tokens} before that"
        )
        return Completion(running.request, latency_s=now - running.since, error=error)


class _Running:
    """When a request was added, and when it last got a token: infinity until it is scheduled."""

    __slots__ = ("last_token_at", "request", "since", "tokens")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.since = time.monotonic()
        self.last_token_at = float("inf")
        self.tokens = -1

    def saw(self, tokens: int, now: float) -> None:
        if tokens != self.tokens:
            self.tokens, self.last_token_at = tokens, now


def sampling_params(sampling: Mapping[str, Any]) -> Any:
    """``vllm.SamplingParams`` from a dict, with its names and types checked.

    vLLM itself accepts ``seed="x"`` and hangs on it later; msgspec finds wrong types, but ignores
    unknown names, so names are compared with the struct's own.

    Raises:
        RequestError: naming the parameter.
    """
    import msgspec
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import RequestOutputKind

    known = [name for name in SamplingParams.__struct_fields__ if not name.startswith("_")]
    for name in sampling:
        if name not in known:
            raise RequestError(f"sampling.{name}: vLLM has no such parameter{near(name, known)}")
    values = dict(sampling)
    if isinstance(values.get("logit_bias"), Mapping):  # JSON and TOML keys are text
        values["logit_bias"] = {_token_id(key): v for key, v in values["logit_bias"].items()}
    try:
        params = msgspec.convert(values, SamplingParams, strict=True)
    except (msgspec.ValidationError, VLLMValidationError, ValueError, TypeError) as error:
        raise RequestError(f"sampling: {error}") from error
    if params.seed is not None and not -(2**63) <= params.seed < 2**63:
        raise RequestError(f"sampling.seed: found {params.seed}, expected a 64-bit number")
    if params.prompt_logprobs is not None:
        raise RequestError("sampling.prompt_logprobs: batchkit does not store them; leave it out")
    params.output_kind = RequestOutputKind.FINAL_ONLY
    return params


def _check_config(job: JobConfig) -> Any:
    """The job's ``VllmConfig``; checks names, values, and what the model's own config allows."""
    _set_environment()
    from vllm.engine.arg_utils import EngineArgs

    options = job.engine.options
    known = list(EngineArgs.__dataclass_fields__)
    problems = [
        f"engine.options.{name}: vLLM has no such option{near(name, known)}"
        for name in options
        if name not in known and name != "chat_template"
    ]
    problems += [
        f"engine.options.{name}: set by batchkit; leave it out"
        for name in ("model", "disable_log_stats")
        if name in options
    ]
    for check in (lambda: sampling_params(job.sampling.params()), lambda: chat_template(options)):
        try:
            check()
        except (RequestError, JobError) as error:
            problems.append(str(error))
    if (missing := missing_folder(job.engine.model)) is not None:
        problems.append(missing)
    if problems:
        raise JobError("\n".join(problems))
    args = {k: v for k, v in _llm_options(job).items() if k != "chat_template"}
    try:
        return EngineArgs(**args).create_engine_config()
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        raise JobError(f"engine: {explain(error, job.engine.model)}") from error


def _llm_options(job: JobConfig) -> dict[str, Any]:
    from vllm.platforms import current_platform

    options = {**_DEFAULTS, "seed": job.run.seed, **job.engine.options}
    if current_platform.is_cpu() and not any(name in options for name in _MEMORY_OPTIONS):
        options["kv_cache_memory_bytes"] = _CPU_KV_CACHE_BYTES
    if job.engine.lora is not None:
        options.setdefault("enable_lora", True)
    # The stats carry the scheduler's load; printing them is switched off by the log level.
    return {"model": job.engine.model, **options, "disable_log_stats": False}


def _set_environment(log_level: str = _QUIET) -> None:
    """Variables that must be set before vLLM is imported; those the user set are kept."""
    for name, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Errors reach us as exceptions; vLLM would also print its whole state.
        "VLLM_LOGGING_LEVEL": log_level,
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout is for results
        "VLLM_NO_USAGE_STATS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TRANSFORMERS_VERBOSITY": "error",
    }.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")
    # vLLM warns on import, before it has read the level from the environment.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])


def _load(job: JobConfig, limits: Mapping[str, Any]) -> Any:
    import vllm

    _keep_rendezvous_in(os.environ.get(SCRATCH))
    try:
        return vllm.LLM(**_llm_options(job))
    except Exception as error:
        # Loading runs the model's code and the device's drivers, which may raise any type.
        message = explain(error, job.engine.model)
        raise StartFailed(message, fault_of(error), limits) from error


def _keep_rendezvous_in(folder: str | None) -> None:
    """In ``folder``, which is deleted with the engine, create the file by which vLLM's processes
    find each other: vLLM leaves it among the temporary files, and has no setting for this."""
    from vllm.utils import network_utils

    if folder is not None and hasattr(network_utils, "get_file_store_init_method"):
        network_utils.tempfile = SimpleNamespace(gettempdir=lambda: folder)


def _limits(vllm_config: Any) -> dict[str, Any]:
    scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
    limits = {
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
    }
    if cache.kv_cache_memory_bytes is not None:
        return {**limits, "kv_cache_memory_bytes": cache.kv_cache_memory_bytes}
    return {**limits, "gpu_memory_utilization": cache.gpu_memory_utilization}


def _lora_request(job: JobConfig) -> Any:
    if job.engine.lora is None:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest("adapter", 1, job.engine.lora)


def _unknown_images(error: Any, prompt: Mapping[str, Any]) -> Sequence[str]:
    """The hashes of the images that the engine was expected to have from an earlier request."""
    if isinstance(error, AssertionError) and "Expected a cached item" in str(error):  # vLLM 0.26
        return [image for hashes in prompt["mm_hashes"].values() for image in hashes]
    missing: Sequence[str] = getattr(error, "mm_hashes", ())  # MultiModalCacheMissError
    return missing


def _refusal(error: Any) -> RowError:
    kind = PromptTooLongError if error.parameter in _TOO_LONG else RequestError
    return kind(str(error))


def _logprobs(logprobs: Any, token_ids: Sequence[int]) -> list[dict[str, Any]] | None:
    """In OpenAI's shape: each token's text, logprob and alternatives, most likely first."""
    if logprobs is None:
        return None
    content = []
    for token_id, alternatives in zip(token_ids, logprobs, strict=True):
        chosen = alternatives[token_id]
        top = sorted(alternatives.values(), key=lambda found: found.rank)
        content.append(
            {
                "token": chosen.decoded_token,
                "logprob": chosen.logprob,
                "top_logprobs": [{"token": t.decoded_token, "logprob": t.logprob} for t in top],
            }
        )
    return content


def _token_id(key: Any) -> Any:
    return int(key) if isinstance(key, str) and key.lstrip("-").isdigit() else key


class _Stats:
    """A stat logger of vLLM's engine that keeps the last step's statistics."""

    def __init__(self) -> None:
        self._last = EngineLoad(0, 0, 0.0, 0)
        self._preempted = 0

    def load(self) -> EngineLoad:
        load = self._last._replace(preempted=self._preempted)
        self._preempted = 0
        return load

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        if scheduler_stats is not None:
            self._last = EngineLoad(
                scheduler_stats.num_running_reqs,
                scheduler_stats.num_waiting_reqs,
                scheduler_stats.kv_cache_usage,
                0,
            )
        if iteration_stats is not None:
            self._preempted += iteration_stats.num_preempted_reqs

    def log(self) -> None: ...

    def log_engine_initialized(self) -> None: ...

    def record_sleep_state(self, *_: Any) -> None: ...


def _follow_stats(engine: Any) -> _Stats:
    """Replace vLLM's own stat loggers, whose Prometheus counters nobody would read, by ours."""
    stats = _Stats()
    engine.logger_manager.stat_loggers = [stats]
    return stats
