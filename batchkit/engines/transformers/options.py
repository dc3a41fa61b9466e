"""The ``[engine.options]`` of this engine."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Literal

from pydantic import Field, PositiveInt

from batchkit.config.tables import JobConfig, Table
from batchkit.engines import request_checks
from batchkit.engines.transformers.sampling import sampling_of
from batchkit.engines.vllm.options import set_environment
from batchkit.engines.vllm.parsing import unknown_parsers
from batchkit.errors import JobError, RequestError


class Options(Table):
    """Named as in vLLM, or else as in transformers."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: as in the checkpoint
    device_map: str | dict[str, str | int] | None = None  # None: one GPU, or the CPU without one
    attn_implementation: str | None = None
    max_model_len: PositiveInt | None = None  # None: the model's own
    max_num_seqs: PositiveInt = 8
    shrink_on_oom: bool = True  # false: the engine dies, as find-bs and bench need
    revision: str | None = None
    trust_remote_code: bool = False
    chat_template: str | None = None
    mm_processor_kwargs: dict[str, Any] = Field({})


def options_of(job: JobConfig) -> Options:
    """The job's options, with ``chat_template`` read. Also checks sampling, model and adapter.

    Raises:
        JobError: lists everything that is wrong, one line each.
    """
    given, template = job.engine.options, None
    problems = request_checks.problems_with("engine.options", Options, given, job.engine.kind)
    if not problems:
        try:
            template = request_checks.chat_template(given)
        except JobError as error:
            problems.append(str(error))
    try:
        sampling_of(job.sampling.params())
    except RequestError as error:
        problems.append(str(error))
    if (missing := request_checks.missing_folder(job.engine.model)) is not None:
        problems.append(missing)
    parsers = {
        f"engine.{name}": getattr(job.engine, name)
        for name in ("reasoning_parser", "tool_call_parser")
    }
    for key, value, package in (
        *((key, value, "vllm") for key, value in parsers.items()),
        ("engine.lora", job.engine.lora, "peft"),
        ("engine.options.device_map", given.get("device_map"), "accelerate"),
    ):
        if value is not None and find_spec(package) is None:
            problems.append(f"{key} needs the package {package}: pip install {package}")
    if any(parsers.values()) and not problems:
        set_environment()
        problems = unknown_parsers(job)
    if problems:
        raise JobError("\n".join(problems))
    return Options(**{**given, "chat_template": template})
