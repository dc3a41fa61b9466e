"""A row's sampling parameters: those of ``vllm.SamplingParams`` that this engine supports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from batchkit.config.tables import Table
from batchkit.engines.request_checks import problems_with
from batchkit.errors import RequestError

GREEDY_BELOW = 1e-5  # as in vLLM


def _by_number(bias: Any) -> Any:
    """Token ids as numbers: JSON's and TOML's keys are text."""
    if not isinstance(bias, Mapping):
        return bias
    return {
        int(key) if isinstance(key, str) and key.isdigit() else key: value
        for key, value in bias.items()
    }


TokenIds = list[NonNegativeInt]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class Sampling(Table):
    """Names, defaults and bounds are vLLM's."""

    n: PositiveInt = 1
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)  # 0 and -1: all
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: PositiveFloat = 1.0
    logit_bias: Annotated[dict[NonNegativeInt, float], BeforeValidator(_by_number)] | None = None
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
        return [token for tokens in named for token in tokens]

    @model_validator(mode="after")
    def _coherent(self) -> Sampling:
        if self.n > 1 and self.is_greedy:
            raise ValueError("n: greedy sampling (temperature = 0) gives the same answer n times")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is over max_tokens {self.max_tokens}")
        if self.stop == "":
            raise ValueError("stop: found '', which would end every answer before it begins")
        return self


def sampling_of(values: Mapping[str, Any]) -> Sampling:
    """Raises:
    RequestError: naming each parameter that is wrong, or that only vLLM knows.
    """
    if problems := problems_with("sampling", Sampling, values, "transformers"):
        raise RequestError("\n".join(problems))
    return Sampling(**values)
