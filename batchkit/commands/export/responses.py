"""Answers in the format of OpenAI's Responses API: https://platform.openai.com/docs/api-reference/responses/object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_CUT_OFF = {"length": "max_output_tokens", "content_filter": "content_filter"}


def response_of(record: Mapping[str, Any], choice: Mapping[str, Any]) -> dict[str, Any]:
    """Return the response body for ``choice``, the record's selected answer. The caller adds id, time and model.

    Parameters of the request are not repeated; they are in the input line.
    """
    cut_off = _CUT_OFF.get(str(choice.get("finish_reason")))
    status = "completed" if cut_off is None else "incomplete"
    return {
        "object": "response",
        "status": status,
        "error": None,
        "incomplete_details": None if cut_off is None else {"reason": cut_off},
        "output": [*_output(record["index"], choice, status)],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": _usage(tokens_of(record)),
    }


def _output(index: int, choice: Mapping[str, Any], status: str) -> Iterator[dict[str, Any]]:
    if reasoning := choice.get("reasoning"):
        content = [{"type": "reasoning_text", "text": reasoning}]
        yield {"id": f"rs-{index}", "type": "reasoning", "summary": [], "content": content}
    calls = choice.get("tool_calls") or ()
    if (text := choice.get("text")) or not calls:
        part: dict[str, Any] = {"type": "output_text", "text": text or "", "annotations": []}
        message = {"role": "assistant", "status": status, "content": [part]}
        yield {"id": f"msg-{index}", "type": "message", **message}
    for n, call in enumerate(calls):
        made = {"call_id": call.get("id") or f"call_{n}", **call["function"], "status": status}
        yield {"id": f"fc-{index}-{n}", "type": "function_call", **made}


_NONE = {"prompt_tokens": 0, "completion_tokens": 0}


def tokens_of(record: Mapping[str, Any]) -> Mapping[str, int] | None:
    """Return the record's usage: no tokens for a copied answer, None if it is unknown."""
    is_copy = record.get("duplicate_of") is not None or record.get("reused_from") is not None
    return _NONE if is_copy else record.get("usage")


def _usage(usage: Mapping[str, int] | None) -> dict[str, Any] | None:
    if not usage:
        return None
    sent, answered = usage["prompt_tokens"], usage["completion_tokens"]
    return {
        "input_tokens": sent,
        "input_tokens_details": {
            "cached_tokens": usage.get("cached_tokens") or 0,
            "cache_write_tokens": 0,
        },
        "output_tokens": answered,
        "output_tokens_details": {"reasoning_tokens": usage.get("reasoning_tokens") or 0},
        "total_tokens": sent + answered,
    }
