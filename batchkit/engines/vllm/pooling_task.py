"""What a model can do besides generating text: vLLM's pooling tasks and their parameters."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any, get_type_hints

from batchkit.config.suggest import did_you_mean
from batchkit.config.tables import JobConfig
from batchkit.errors import JobError, RequestError

_INTERNAL = ("task", "requires_token_ids", "late_interaction_params", "output_kind")
_LIMITS = ("max_tokens_per_query", "max_tokens_per_doc")
# What vLLM calls the tasks of a model that can do the job's.
_NEEDED = {
    "embed": ("embed",),
    "classify": ("classify",),
    "score": ("embed", "classify", "token_embed"),
}


def pooling_params(
    given: Mapping[str, Any], task: str | None = None, *, of_pair: bool = False
) -> Any:
    """``vllm.PoolingParams`` from a dict, with its names and types checked. ``of_pair``: it may also
    have the limits of a pair's texts, which are parameters of vLLM's server.

    Raises:
        RequestError: naming the parameter.
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
        params.extra_kwargs = {**(params.extra_kwargs or {}), **extra}  # where LLM.score looks
    return params


@cache
def _types() -> dict[str, Any]:
    """The parameters that a user may set, with their types."""
    from vllm import PoolingParams

    hints = get_type_hints(PoolingParams)
    return {n: hints[n] for n in PoolingParams.__struct_fields__ if n not in _INTERNAL}


def check_pooling(job: JobConfig, model_config: Any) -> None:
    """What can be known without the model's weights.

    Raises:
        JobError: the model can't do the job's task, or has no such parameter.
    """
    import vllm
    from vllm.exceptions import VLLMValidationError

    if find_spec("vllm.entrypoints.pooling.offline") is None:
        raise JobError(f'task = "{job.task}": needs vLLM 0.32 or newer; found {vllm.__version__}')
    converted = {"embed": "embed", "classify": "classify"}.get(model_config.convert_type)
    if converted is not None and getattr(model_config.pooler_config, "task", None) is None:
        check_task(job, converted, model_config)
    task = job.task if job.task != "score" else task_by_config(model_config)
    try:
        params = pooling_params(job.params(), task, of_pair=job.task == "score")
        params.verify(model_config)
    except VLLMValidationError as error:
        raise JobError(f"pooling: {error}") from error


def check_task(job: JobConfig, vllm_task: str | None, model_config: Any) -> None:
    """Raises JobError if a model that vLLM runs for ``vllm_task`` can't do the job's task."""
    task, model = job.task, f"{job.engine.model} ({', '.join(model_config.architectures)})"
    labels = getattr(model_config.hf_config, "num_labels", 0)
    if vllm_task in _NEEDED[task]:
        if task == "score" and vllm_task == "classify" and labels != 1:
            raise JobError(
                f'task = "score": {model} has {labels} classes, and a model that scores pairs has one;'
                ' task = "classify" gives the probabilities of its classes'
            )
        return
    remedies = {
        "embed": 'take an embedding model, or set engine.options.convert = "embed" to use what it has'
        " instead of a head",
        "classify": "take a model with classes (…ForSequenceClassification)",
        "score": "take a cross-encoder, or an embedding model",
    }
    raise JobError(
        f'task = "{task}": vLLM runs {model} for {vllm_task or "generation"}; {remedies[task]}'
    )


def task_by_config(model_config: Any) -> str:
    given = getattr(model_config.pooler_config, "task", None)
    by_score = {"cross-encoder": "classify", "late-interaction": "token_embed"}
    return given or by_score.get(model_config.score_type, "embed")
