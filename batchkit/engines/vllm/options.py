"""A job's engine options, sampling and pooling parameters as objects of vLLM's own classes; the environment of vLLM."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, get_args, get_type_hints

from pydantic import ValidationError

from batchkit.config.suggest import did_you_mean
from batchkit.config.tables import OF_TOKENS, JobConfig
from batchkit.engines.memory import free_bytes, visible_gpus
from batchkit.engines.process.startup import explain
from batchkit.engines.request_checks import chat_template, missing_model
from batchkit.engines.vllm.adapters import adapters_of, check_adapters, lora_options
from batchkit.engines.vllm.parsing import unknown_parsers
from batchkit.errors import JobError, RequestError

# The image cache keeps processed pixels of images that are used again. Rows that share an image
# are close together, so a small cache is enough; vLLM's default of 4 GiB would only fill up.
_DEFAULTS = {"mm_processor_cache_gb": 0.25, "use_tqdm_on_load": False}
# On a CPU vLLM would claim nine tenths of the host's memory, and refuse to start with less.
_CPU_KV_CACHE_BYTES = 2 * 2**30
_SHARE_OF_GPU = 0.9  # about vLLM's default of gpu_memory_utilization (0.92 in vLLM 0.32)
_MEMORY_OPTIONS = ("kv_cache_memory_bytes", "gpu_memory_utilization")
QUIET = "CRITICAL"
_INTERNAL = ("task", "requires_token_ids", "late_interaction_params", "output_kind")
_LIMITS = ("max_tokens_per_query", "max_tokens_per_doc")
# Tasks of a model whose head vLLM replaces, by vLLM's ``convert_type``; the default task comes first.
_CONVERTED = {"embed": ("embed", "token_embed"), "classify": ("classify", "token_classify")}
# By the job's task: vLLM's names of pooling tasks, one of which the model must support.
_NEEDED = {
    "embed": ("embed",),
    "token_embed": ("token_embed",),
    "classify": ("classify",),
    "token_classify": ("token_classify",),
    "score": ("embed", "classify", "token_embed"),
}


def options_for_share(options: Mapping[str, Any], engines: int) -> dict[str, Any]:
    """Return ``options`` for one of ``engines`` engines on a GPU. The options that claim memory are for all of them
    together; each loads its own weights, and uses the rest of its part for its KV cache."""
    of_all = {"gpu_memory_utilization": _SHARE_OF_GPU, **options}
    parts = {"gpu_memory_utilization": round(of_all["gpu_memory_utilization"] / engines, 3)}
    if (cache := options.get("kv_cache_memory_bytes")) is not None:
        parts["kv_cache_memory_bytes"] = cache // engines
    if (offloaded := options.get("kv_offloading_size")) is not None:
        parts["kv_offloading_size"] = offloaded / engines
    return {**options, **parts}


def check_config(job: JobConfig) -> Any:
    """Return vLLM's ``VllmConfig`` for the job. Raises JobError if an option has a wrong name or value, or the model
    can't do the task."""
    set_environment()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    options = job.engine.options
    known = list(EngineArgs.__dataclass_fields__)
    problems = [
        f"engine.options.{name}: vLLM has no such option{did_you_mean(name, known)}"
        for name in options
        if name not in known and name != "chat_template"
    ]
    problems += [
        f"engine.options.{name}: set by batchkit; leave it out"
        for name in ("model", "disable_log_stats")
        if name in options
    ]
    problems += [
        f"engine.options.{name}: found JSON as text; write it as a TOML table, for example"
        f' {name} = {{method = "ngram"}}, without quotes around it'
        for name, value in options.items()
        if isinstance(value, str) and value.lstrip().startswith("{") and name != "chat_template"
    ]
    if (copies := options.get("data_parallel_size", 1)) != 1:
        problems.append(
            f"engine.options.data_parallel_size: batchkit runs copies of the model as workers:"
            f" leave this option out, and set workers.count = {copies}"
        )
    if "reasoning_parser" in options:
        problems.append(
            "engine.options.reasoning_parser: set engine.reasoning_parser instead, which also"
            " removes the reasoning from the answers"
        )
    drafting = options.get("speculative_config")
    if isinstance(drafting, dict) and drafting.get("rejection_sample_method") == "synthetic":
        problems.append(
            'engine.options.speculative_config.rejection_sample_method: found "synthetic", which accepts wrong tokens'
            " to simulate a speed; leave it out"
        )
    problems += unknown_parsers(job)
    checks = partial(_check_params, job), partial(chat_template, options), partial(adapters_of, job)
    for check in checks:
        try:
            check()
        except (RequestError, JobError) as error:
            problems.append(str(error))
    if (missing := missing_model(job.engine.model)) is not None:
        problems.append(missing)
    if problems:
        raise JobError("\n".join(problems))
    args = {k: v for k, v in llm_options(job).items() if k != "chat_template"}
    try:
        # The same context as in ``vllm.LLM``: the default of max_num_seqs depends on it.
        config = EngineArgs(**args).create_engine_config(UsageContext.LLM_CLASS)
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        raise JobError(f"engine: {explain(error, job.engine.model)}") from error
    check_adapters(adapters_of(job), config)
    if not job.generates:
        check_pooling(job, config.model_config)
    elif reason := why_not_bounded(job.sampling.params(), config):
        raise JobError(reason)
    return config


_SPEEDS = {
    "max_num_seqs": "scheduler_config",
    "max_num_batched_tokens": "scheduler_config",
    "async_scheduling": "scheduler_config",
    "enable_prefix_caching": "cache_config",
    "enable_chunked_prefill": "scheduler_config",
    "enforce_eager": "model_config",
}
"""Options that change speed but not answers, and the part of vLLM's config that has the value in use."""
_MOST_OF_GPU = 0.95  # maximum share of the GPU's memory that tune tries
_SHARE_OF_HOST = 0.5  # of the host's free memory: buffer for KV caches that tune tries
# Drafts copied from the prompt, which needs no other model; vLLM's documentation uses these numbers.
_NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
_LONG_PROMPT = (
    0.04  # share of max_model_len; vLLM's own threshold if it limits the prefill of long prompts
)


def speed_options(job: JobConfig) -> dict[str, Any]:
    """Return the speed options that the installed vLLM has: for each, the value in use, or a list of other values to
    try. Raises JobError like ``check_config``."""
    config = check_config(job)
    from vllm.engine.arg_utils import EngineArgs

    known = EngineArgs.__dataclass_fields__
    in_force = {
        name: getattr(getattr(config, part), name)
        for name, part in _SPEEDS.items()
        if name in known and hasattr(getattr(config, part), name)
    }
    others = {name: values for name, values in _other_values(job, config) if name in known}
    if "performance_mode" in known and not config.model_config.enforce_eager:
        # "throughput" only doubles the two sizes, which ``tune`` multiplies itself.
        modes = {*get_args(known["performance_mode"].type)} - {"throughput"}
        others["performance_mode"] = sorted(modes - {config.performance_mode})
    return in_force | others


def _other_values(job: JobConfig, config: Any) -> Iterator[tuple[str, list[Any]]]:
    """Yield options with a list of other values to try, for options that cannot simply be doubled or halved."""
    cache, scheduler = config.cache_config, config.scheduler_config
    if (claimed := cache.kv_cache_memory_bytes) is not None:
        yield "kv_cache_memory_bytes", [2 * claimed]
    elif cache.gpu_memory_utilization < _MOST_OF_GPU:
        yield "gpu_memory_utilization", [_MOST_OF_GPU]
    n_gpus, is_set = visible_gpus(), getattr(cache, "kv_offloading_size", None) is not None
    if n_gpus and not is_set:
        buffer_gib = _SHARE_OF_HOST * free_bytes() / n_gpus // 2**30
        yield "kv_offloading_size", [buffer_gib] if buffer_gib else []
    graphs = getattr(config.compilation_config, "max_cudagraph_capture_size", None)
    if graphs and graphs < scheduler.max_num_seqs and not config.model_config.enforce_eager:
        yield "max_cudagraph_capture_size", [scheduler.max_num_seqs]
    if job.prompt.has_media:
        yield "mm_processor_cache_gb", [4.0, 0]
    if scheduler.enable_chunked_prefill and not scheduler.long_prefill_token_threshold:  # 0: none
        threshold = int(config.model_config.max_model_len * _LONG_PROMPT)
        yield "long_prefill_token_threshold", [max(1, threshold)]
    if isinstance(cache.block_size, int) and "block_size" not in job.engine.options:
        yield "block_size", [2 * cache.block_size]


def changing_options(job: JobConfig) -> dict[str, Any]:
    """Return options that may make the job faster but change its answers, each with values that the job does not use.
    Raises JobError like ``check_config``."""
    config = check_config(job)
    model, cache = config.model_config, config.cache_config
    found: dict[str, Any] = {}
    if str(model.dtype) != "torch.bfloat16":
        found["dtype"] = ["bfloat16"]
    if model.quantization is None:
        found["quantization"] = ["fp8"]
    if "fp8" not in cache.cache_dtype:
        found["kv_cache_dtype"] = ["fp8"]
    if config.speculative_config is None:
        found["speculative_config"] = [_NGRAM]
    return found


def why_not_bounded(sampling: Mapping[str, Any], vllm_config: Any) -> str | None:
    """Return why vLLM can't limit the reasoning to ``thinking_token_budget``; None if it can, or if no budget is
    set."""
    found = getattr(vllm_config, "reasoning_config", None)
    if sampling.get("thinking_token_budget") is None or (found is not None and found.enabled):
        return None
    return (
        "sampling.thinking_token_budget: vLLM has to know where the model's reasoning begins and ends;"
        " set engine.reasoning_parser, or reasoning_start_str and reasoning_end_str in"
        " engine.options.reasoning_config"
    )


def _check_params(job: JobConfig) -> None:
    if job.generates:
        sampling_params(job.sampling.example())
    else:
        pooling_params(job.params(), of_pair=job.task == "score")


def llm_options(job: JobConfig) -> dict[str, Any]:
    from vllm.platforms import current_platform

    options = {**_DEFAULTS, "seed": job.run.seed, **job.engine.options}
    if current_platform.is_cpu() and not any(name in options for name in _MEMORY_OPTIONS):
        options["kv_cache_memory_bytes"] = _CPU_KV_CACHE_BYTES
    if job.engine.lora is not None:
        options.setdefault("enable_lora", True)
    options |= lora_options(adapters_of(job), options)
    if not job.generates:
        options.setdefault("runner", "pooling")
    if job.task in OF_TOKENS:  # vLLM refuses a request whose task is not the model's
        given = options.get("pooler_config") or {}
        if isinstance(given, Mapping):
            options["pooler_config"] = {"task": job.task, **given}
    if job.engine.reasoning_parser is not None:
        # A grammar then applies only to the answer after the reasoning; thinking_token_budget needs the parser, too.
        options["reasoning_parser"] = job.engine.reasoning_parser
    if isinstance(given := options.get("reasoning_config"), Mapping):
        options["reasoning_config"] = _reasoning_config(given)
    # The stats carry the scheduler's load; nothing prints them.
    return {"model": job.engine.model_source, **options, "disable_log_stats": False}


def _reasoning_config(given: Mapping[str, Any]) -> Any:
    """Return ``engine.options.reasoning_config`` as an object of vLLM's class, because vLLM does not accept a dict."""
    from vllm.config.reasoning import ReasoningConfig

    try:
        return ReasoningConfig(**given)
    except ValidationError as error:
        (first, *_) = error.errors(include_url=False)
        place = ".".join(["engine.options.reasoning_config", *map(str, first["loc"])])
        raise JobError(f"{place}: {first['msg']}") from error


def sampling_params(sampling: Mapping[str, Any]) -> Any:
    """Return ``vllm.SamplingParams`` from a dict, after a check of names and types.

    vLLM itself accepts ``seed="x"`` and hangs later. msgspec finds wrong types but ignores unknown names, so the names
    are compared with the fields of vLLM's struct.

    Raises:
        RequestError: A name or a type is wrong; the message names the parameter.
    """
    import msgspec
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    known = _sampling_names()
    if unknown := [name for name in sampling if name not in known]:
        raise RequestError(
            "\n".join(
                f"sampling.{name}: vLLM has no such parameter{did_you_mean(name, known)}"
                for name in unknown
            )
        )
    try:  # ``str_keys``: in JSON and TOML, the keys of logit_bias are text
        params = msgspec.convert(dict(sampling), SamplingParams, strict=True, str_keys=True)
    except (msgspec.ValidationError, VLLMValidationError, ValueError, TypeError) as error:
        raise RequestError(f"sampling: {error}") from error
    if params.seed is not None and not -(2**63) <= params.seed < 2**63:
        raise RequestError(
            f"sampling.seed: found {params.seed}, expected an integer of at most 64 bits"
        )
    if params.prompt_logprobs is not None:
        raise RequestError(
            "sampling.prompt_logprobs: batchkit can't store these; remove this parameter"
        )
    params.output_kind = RequestOutputKind.FINAL_ONLY
    params.skip_clone = True  # these belong to one request, so vLLM needs no deep copy of them
    return params


@cache
def _sampling_names() -> Sequence[str]:
    from vllm import SamplingParams

    return [name for name in SamplingParams.__struct_fields__ if not name.startswith("_")]


def limits_of(vllm_config: Any) -> dict[str, Any]:
    scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
    limits = {
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
    }
    if cache.kv_cache_memory_bytes is not None:
        return {**limits, "kv_cache_memory_bytes": cache.kv_cache_memory_bytes}
    return {**limits, "gpu_memory_utilization": cache.gpu_memory_utilization}


def set_environment(log_level: str = QUIET) -> None:
    """Set the environment variables that vLLM and transformers read when they are imported.

    The user's own log settings are kept.
    """
    for name, value in {
        # Errors reach us as exceptions; vLLM would also print its whole state.
        "VLLM_LOGGING_LEVEL": log_level,
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout is for results
        "VLLM_NO_USAGE_STATS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }.items():
        os.environ.setdefault(name, value)
    if (threads := os.environ.get("OMP_NUM_THREADS")) is not None:
        # n-gram speculation uses numba, which otherwise sets torch's OpenMP threads to the number of cores.
        os.environ.setdefault("NUMBA_NUM_THREADS", threads)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(vllm|transformers)\.")
    # vLLM warns on import, before it has read the level from the environment.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])


def pooling_params(
    given: Mapping[str, Any], task: str | None = None, *, of_pair: bool = False
) -> Any:
    """Return ``vllm.PoolingParams`` from a dict, after a check of names and types. Raises RequestError if a name or a
    type is wrong; the message names the parameter.

    ``of_pair``: also allow the length limits of a pair's texts, which are parameters of vLLM's server only.
    """
    import msgspec
    from vllm import PoolingParams

    limits: dict[str, Any] = dict.fromkeys(_LIMITS if of_pair else (), int)
    types = {**_types(), **limits} if given else {}
    for name, value in given.items():
        if name not in types:
            hint = did_you_mean(name, types) or f"; it knows {', '.join(types)}"
            raise RequestError(f"pooling.{name}: vLLM has no such parameter{hint}")
        try:
            msgspec.convert(value, types[name], strict=True)
        except msgspec.ValidationError as error:
            raise RequestError(f"pooling.{name}: {error}") from error
    extra = {name: value for name, value in given.items() if name in limits}
    params = PoolingParams(**{k: v for k, v in given.items() if k not in extra}, task=task)
    if extra:
        params.extra_kwargs = {**(params.extra_kwargs or {}), **extra}  # LLM.score reads them there
    return params


@cache
def _types() -> dict[str, Any]:
    """Return the pooling parameters that a user may set, with their types."""
    from vllm import PoolingParams

    hints = get_type_hints(PoolingParams)
    return {n: hints[n] for n in PoolingParams.__struct_fields__ if n not in _INTERNAL}


def check_pooling(job: JobConfig, model_config: Any) -> None:
    """Check the pooling task and its parameters, as far as possible without the model's weights.

    Raises:
        JobError: The model cannot do the job's task, or has no such parameter.
    """
    import vllm
    from vllm.exceptions import VLLMValidationError

    if find_spec("vllm.entrypoints.pooling.offline") is None:
        raise JobError(f'task = "{job.task}": needs vLLM 0.32 or newer; found {vllm.__version__}')
    converted = _CONVERTED.get(model_config.convert_type, ())
    if converted and getattr(model_config.pooler_config, "task", None) not in converted:
        check_task(job, converted[0], model_config)
    task = job.task if job.task != "score" else task_by_config(model_config)
    try:
        params = pooling_params(job.params(), task, of_pair=job.task == "score")
        params.verify(model_config)
    except VLLMValidationError as error:
        raise JobError(f"pooling: {error}") from error


def check_task(job: JobConfig, vllm_task: str | None, model_config: Any) -> None:
    """Check that a model can do the job's task. Raises JobError if the model cannot do the task.

    ``vllm_task``: the pooling task for which vLLM runs the model; None if it generates.
    """
    task, model = job.task, f"{job.engine.model} ({', '.join(model_config.architectures)})"
    labels = getattr(model_config.hf_config, "num_labels", 0)
    if vllm_task in _NEEDED[task]:
        if task == "score" and vllm_task == "classify" and labels != 1:
            raise JobError(
                f'task = "score": {model} has {labels} classes, but a model that scores pairs has one class;'
                ' task = "classify" gives the probabilities of its classes'
            )
        return
    remedies = {
        "embed": 'take an embedding model, or set engine.options.convert = "embed" to make vectors of this'
        " model's hidden states",
        "token_embed": "take an embedding model",
        "classify": "take a model with classes (…ForSequenceClassification)",
        "token_classify": "take a model with classes for tokens (…ForTokenClassification)",
        "score": "take a cross-encoder, or an embedding model",
    }
    raise JobError(
        f'task = "{task}": vLLM runs {model} for {vllm_task or "generation"}; {remedies[task]}'
    )


def task_by_config(model_config: Any) -> str:
    given = getattr(model_config.pooler_config, "task", None)
    by_score = {"cross-encoder": "classify", "late-interaction": "token_embed"}
    return given or by_score.get(model_config.score_type, "embed")
