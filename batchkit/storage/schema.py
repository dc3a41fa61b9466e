"""What a record may hold, in one place.

When a server's answer becomes a Completion, ``choice_of`` and ``usage_of`` make it fit; when a
line of the log is read, ``fault_in`` checks it. So nothing is written that a reader would refuse.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from msgspec.structs import replace
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from batchkit.config.masking import masked_text
from batchkit.errors import RowError
from batchkit.storage.index_set import INDEX_LIMIT
from batchkit.storage.plain_json import encoded, valid
from batchkit.types import Choice, ErrorInfo, Usage

# The number of row indexes: the sum over all rows of a run is still a number that JSON can hold.
COUNT_LIMIT = 2**32
LEAST_LOGPROB = -9999.0  # OpenAI and vLLM's server use it for an impossible token


def is_count(value: Any) -> bool:
    """True if ``value`` can be a number of tokens."""
    return type(value) is int and 0 <= value < COUNT_LIMIT


def usage_of(
    prompt_tokens: Any, completion_tokens: Any, reasoning_tokens: Any = None
) -> Usage | None:
    """``possible``, of counts that may be anything."""
    return possible(Usage(prompt_tokens, completion_tokens, reasoning_tokens))


def possible(usage: Usage | None) -> Usage | None:
    """None if one of the first two counts can't be true; the answer itself stays usable."""
    if usage is None or not (is_count(usage.prompt_tokens) and is_count(usage.completion_tokens)):
        return None
    is_known = usage.reasoning_tokens is None or is_count(usage.reasoning_tokens)
    return usage if is_known else replace(usage, reasoning_tokens=None)


def error_of(error: RowError) -> ErrorInfo:
    """How a record describes ``error``; secrets are masked."""
    return ErrorInfo(error.kind, type(error).__name__, masked_text(str(error)), error.retryable)


def choice_of(
    text: str, finish_reason: Any, logprobs: Any, reasoning: Any = None, tool_calls: Any = None
) -> Choice:
    """The choice, with a ``finish_reason`` that is text or None, and the others as in ``Choice``.

    They may be any JSON; what does not have the right shape is None, or left out of a list.
    """
    reason = valid(finish_reason) if isinstance(finish_reason, str) else None
    thought = valid(reasoning) if isinstance(reasoning, str) and reasoning else None
    calls = [*map(_tool_call, tool_calls)] if isinstance(tool_calls, list) else []
    known = [call for call in calls if call is not None]
    return Choice(valid(text), reason, _logprobs(logprobs), thought, known or None)


def seconds_of(value: float) -> float:
    """``value``, or 0 if it can't be a duration."""
    return value if math.isfinite(value) and value >= 0 else 0.0


def fault_in(record: Any) -> str | None:
    """Why the parsed line ``record`` is not a record; None if it is one.

    Only what other code relies on is checked; a key that may be null may be missing.
    ``finish_reason`` may be any JSON: older versions wrote whatever a server answered.
    """
    return _fault(record, _Line)


def fault_in_generation(line: Any) -> str | None:
    """As ``fault_in``, for a line of ``steps.jsonl``."""
    return _fault(line, _Generation)


def _fault(line: Any, kind: type[_Part]) -> str | None:
    if not isinstance(line, dict):
        return f"found {type(line).__name__}, expected an object"
    try:
        kind.__pydantic_validator__.validate_python(line)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return None


_Count = Annotated[int, Field(ge=0, lt=COUNT_LIMIT)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class _Usage(_Part):
    prompt_tokens: _Count
    completion_tokens: _Count
    reasoning_tokens: _Count | None = None


class _Error(_Part):
    kind: str | None = None
    type: str | None = None
    message: str | None = None


class _Function(_Part):
    name: str
    arguments: str


class _ToolCall(_Part):
    id: str | None = None
    function: _Function


class _Choice(_Part):
    text: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Embedding(_Part):
    segment: _Count
    row: _Count
    dimensions: Annotated[int, Field(ge=1, lt=COUNT_LIMIT)]


class _Line(_Part):
    index: Annotated[int, Field(ge=0, lt=INDEX_LIMIT)]
    id: str
    status: Literal["ok", "failed"]
    attempt: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    text: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None
    parsed: Any = None
    usage: _Usage | None = None
    latency_s: float | None = None
    finished_at: str | None = None
    error: _Error | None = None
    prediction: str | None = None
    scores: dict[str, float | None] | None = None
    fields: dict[str, Any] | None = None
    input_hash: str | None = None
    choices: list[_Choice] | None = None
    selected: _Count | None = None
    votes: dict[str, _Count] | None = None
    prompt: str | None = None
    truncated_tokens: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    label: str | None = None
    probabilities: list[float] | None = None
    score: float | list[float] | None = None
    order: list[_Count] | None = None
    embedding: _Embedding | None = None
    generations: _Count | None = None
    steps: dict[str, dict[str, Any]] | None = None
    earlier_usage: _Usage | None = None


class _Generation(_Part):
    index: Annotated[int, Field(ge=0, lt=INDEX_LIMIT)]
    step: str
    call: _Count
    id: str
    status: Literal["ok", "failed"]
    attempt: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    engine: str | None = None
    request_hash: str
    text: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None
    choices: list[_Choice] | None = None
    selected: _Count | None = None
    votes: dict[str, _Count] | None = None
    usage: _Usage | None = None
    earlier_usage: _Usage | None = None
    latency_s: float = 0.0
    error: _Error | None = None
    replay: Literal["fresh"] | None = None


def _tool_call(found: Any) -> dict[str, Any] | None:
    """A call of a function; its arguments are text in OpenAI's API, and a table in that of others."""
    function = found.get("function") if isinstance(found, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return None
    arguments, call_id = function.get("arguments"), found.get("id")
    if not isinstance(arguments, str):
        arguments = encoded({} if arguments is None else arguments).decode().strip()
    return {
        "id": valid(call_id) if isinstance(call_id, str) else None,
        "type": "function",
        "function": {"name": valid(function["name"]), "arguments": valid(arguments)},
    }


def _logprobs(found: Any) -> list[dict[str, Any]] | None:
    """A list of tokens, from either of the two shapes of OpenAI's API."""
    try:
        if "content" in found:
            return [
                {**_token(token), "top_logprobs": _tops(token.get("top_logprobs") or ())}
                for token in found["content"] or ()
            ]
        tops = found.get("top_logprobs") or [None] * len(found["tokens"])
        return [
            {
                **_token({"token": token, "logprob": logprob}),
                "top_logprobs": _tops({"token": t, "logprob": lp} for t, lp in (top or {}).items()),
            }
            for token, logprob, top in zip(
                found["tokens"], found["token_logprobs"], tops, strict=True
            )
        ]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None


def _tops(tokens: Iterable[Any]) -> list[dict[str, Any]]:
    return [_token(token) for token in tokens]


def _token(token: Mapping[str, Any]) -> dict[str, Any]:
    text, logprob = token["token"], token["logprob"]
    if not isinstance(text, str) or type(logprob) not in (int, float):
        raise TypeError("not a token")
    if not (logprob < math.inf):  # also NaN
        raise ValueError("not a logprob")
    return {"token": valid(text), "logprob": float(max(logprob, LEAST_LOGPROB))}
