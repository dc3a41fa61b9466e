"""Conversion of answers into values that a line of a log can hold.

``choice_of`` and ``possible`` replace or drop invalid parts, so that readers (``lines.py``) accept every line that is
written.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from batchkit.config.masking import masked_text
from batchkit.config.terminal import bounded
from batchkit.errors import RowError
from batchkit.storage.plain_json import encoded, valid
from batchkit.types import (
    COUNT_LIMIT,
    Choice,
    Completion,
    ErrorInfo,
    Usage,
    line_of_choice,
    utc_now,
)

LEAST_LOGPROB = -9999.0  # OpenAI and vLLM's server use it for an impossible token


def answer_of(
    completion: Completion, choices: Sequence[Choice], *, of_failed: bool
) -> dict[str, Any]:
    """Return the fields of ``LoggedAnswer`` for ``completion``.

    - ``choices``: the choices to store.
    - ``of_failed``: store the answer also if the completion has an error.
    """
    request, error, choice = completion.request, completion.error, completion.choice
    keeps = of_failed or error is None
    several = len(choices) > 1 or (choice is not None and choice.logprobs is not None)
    answer = choice if keeps else None
    return {
        "index": request.row.index,
        "id": request.row.id,
        "status": "ok" if error is None else "failed",
        "attempt": request.attempt,
        "text": None if answer is None else answer.text,
        "reasoning": None if choice is None else choice.reasoning,
        "tool_calls": None if answer is None else answer.tool_calls,
        "finish_reason": None if choice is None else choice.finish_reason,
        "usage": None if completion.is_copy else possible(completion.usage),
        "earlier_usage": possible(completion.earlier_usage),
        "latency_s": round(seconds_of(completion.latency_s), 4),
        "finished_at": utc_now(),
        "error": None if error is None else error_of(error),
        "choices": [*map(line_of_choice, choices)] if several and keeps else None,
        "selected": completion.selected if keeps else None,
        "votes": completion.votes if keeps else None,
        "lora": request.lora and masked_text(request.lora),
        "request_hash": request.request_hash or None,
        "duplicate_of": completion.duplicate_of,
        "reused_from": completion.reused_from,
    }


def is_count(value: Any) -> bool:
    """Return True if ``value`` can be a number of tokens."""
    return type(value) is int and 0 <= value < COUNT_LIMIT


def possible(usage: Usage | None) -> Usage | None:
    """Return ``usage`` without invalid counts; None if the prompt tokens or the completion tokens are invalid."""
    if usage is None or not (is_count(usage.prompt_tokens) and is_count(usage.completion_tokens)):
        return None
    parts = {"reasoning_tokens": usage.reasoning_tokens, "cached_tokens": usage.cached_tokens}
    wrong = {name: None for name, n in parts.items() if not (n is None or is_count(n))}
    return replace(usage, **wrong) if wrong else usage


def error_of(error: RowError) -> ErrorInfo:
    """Return ``error`` as a record stores it, with secrets masked."""
    return ErrorInfo(error.kind, type(error).__name__, masked_text(str(error)), error.retryable)


def choice_of(
    text: str, finish_reason: Any, logprobs: Any, reasoning: Any = None, tool_calls: Any = None
) -> Choice:
    """Return a Choice made from parts of a server's answer, which may have any JSON type.

    A part of the wrong type becomes None. In a list, entries of the wrong type are left out.
    """
    reason = bounded(valid(finish_reason)) if isinstance(finish_reason, str) else None
    thought = valid(reasoning) if isinstance(reasoning, str) and reasoning else None
    calls = [*map(_tool_call, tool_calls)] if isinstance(tool_calls, list) else []
    known = [call for call in calls if call is not None]
    return Choice(valid(text), reason, _logprobs(logprobs), thought, known or None)


def seconds_of(value: float) -> float:
    """Return ``value``, or 0 if it can't be a duration."""
    return value if math.isfinite(value) and value >= 0 else 0.0


def _tool_call(found: Any) -> dict[str, Any] | None:
    """Return a tool call in OpenAI's shape, with its arguments as text; other APIs send them as an object."""
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
    """Return the log probabilities as a list of tokens, from either of OpenAI's two shapes; None for any other
    value."""
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
