"""The ``[engine.options]`` of the transformers engine, and the vLLM sampling parameters that it supports."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Strict,
    model_validator,
)

from batchkit.config.tables import JobConfig, Table
from batchkit.engines import request_checks
from batchkit.engines.vllm.options import set_environment
from batchkit.engines.vllm.parsing import unknown_parsers
from batchkit.errors import JobError, RequestError
from batchkit.types import GREEDY_BELOW

TokenIds = list[NonNegativeInt]
TokenKey = Annotated[NonNegativeInt, Strict(False)]  # text in JSON and TOML
Penalty = Annotated[float, Field(ge=-2, le=2)]


class TransformersOptions(Table):
    """The engine options, with vLLM's names, or transformers' names where vLLM has none."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: as in the checkpoint
    device_map: str | dict[str, str | int] | None = None  # None: one GPU, or the CPU without one
    attn_implementation: str | None = None
    max_model_len: PositiveInt | None = None  # None: the model's own
    max_num_seqs: PositiveInt = 8
    shrink_on_oom: bool = True  # false: the engine dies when memory runs out; find-bs needs this
    revision: str | None = None
    trust_remote_code: bool = False
    chat_template: str | None = None
    mm_processor_kwargs: dict[str, Any] = Field({})


def options_of(job: JobConfig) -> TransformersOptions:
    """Return the job's engine options, with the content of the file that ``chat_template`` names.

    Sampling parameters, model and adapter are checked, too. Raises JobError with all mistakes, one line each.
    """
    given, template = job.engine.options, None
    problems = request_checks.problems_with(
        "engine.options", TransformersOptions, given, job.engine.kind
    )
    try:
        template = None if problems else request_checks.chat_template(given)
        sampling_of(job.sampling.example())
    except (JobError, RequestError) as error:
        problems.append(str(error))
    if (missing := request_checks.missing_model(job.engine.model)) is not None:
        problems.append(missing)
    engine = job.engine
    for key, value, package in (
        ("engine.reasoning_parser", engine.reasoning_parser, "vllm"),
        ("engine.tool_call_parser", engine.tool_call_parser, "vllm"),
        ("engine.lora", engine.lora, "peft"),
        ("engine.options.device_map", given.get("device_map"), "accelerate"),
    ):
        if value is not None and find_spec(package) is None:
            problems.append(f"{key} needs the package {package}: pip install {package}")
    set_environment()
    if problems := problems or unknown_parsers(job):
        raise JobError("\n".join(problems))
    return TransformersOptions(**{**given, "chat_template": template})


class Sampling(Table):
    """Sampling parameters with vLLM's names, defaults and bounds."""

    n: PositiveInt = 1
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)  # 0 and -1: all
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: PositiveFloat = 1.0
    logit_bias: dict[TokenKey, float] | None = None
    allowed_token_ids: TokenIds | None = Field(None, min_length=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    max_tokens: PositiveInt | None = 16  # None: all that fit
    min_tokens: NonNegativeInt = 0
    stop: str | list[Annotated[str, Field(min_length=1)]] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: NonNegativeInt | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def stops(self) -> list[str]:
        """The texts that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def token_ids(self) -> list[int]:
        """All token ids in the parameters."""
        named = (self.logit_bias or (), self.allowed_token_ids or (), self.stop_token_ids or ())
        return [*itertools.chain(*named)]

    @model_validator(mode="after")
    def _coherent(self) -> Sampling:
        if self.n > 1 and self.is_greedy:
            raise ValueError(
                "n: with temperature = 0 (greedy decoding), all n answers would be the same; set a temperature above 0, or leave n out"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens {self.min_tokens} is larger than max_tokens {self.max_tokens}; lower min_tokens or raise max_tokens"
            )
        if self.stop == "":
            raise ValueError("stop: found '', which would end every answer before it begins")
        return self


def sampling_of(values: Mapping[str, Any]) -> Sampling:
    """Return the sampling parameters in ``values`` after a check.

    Raises:
        RequestError: A parameter is wrong, or only vLLM supports it; the message names each.
    """
    if problems := request_checks.problems_with("sampling", Sampling, values, "transformers"):
        raise RequestError("\n".join(problems))
    return Sampling(**values)
