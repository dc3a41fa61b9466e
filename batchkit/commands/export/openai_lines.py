"""A record as a line of OpenAI's batch output: https://platform.openai.com/docs/guides/batch.

The body of a row that was generated is a ``chat.completion`` as the ``openai`` package reads it;
``openai_answers.py`` has the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from batchkit.storage.schema import LEAST_LOGPROB

_FINISH_REASONS = ("stop", "length", "tool_calls", "content_filter", "function_call")
_CUT_OFF = ("abort", "error", "max_tokens", "repetition")  # vLLM's and other servers'


class Answer(NamedTuple):
    """What a body has besides the parts of all bodies; its id begins with ``kind``."""

    kind: str
    parts: Mapping[str, Any]


def chat(record: Mapping[str, Any]) -> Answer:
    """The answer of a row that was generated; of several choices the one that was selected, if one was."""
    kept, selected = record.get("choices") or [record], record.get("selected")
    if selected is not None and len(kept) > 1:
        kept = [kept[selected]]
    choices = [_choice(number, choice) for number, choice in enumerate(kept)]
    usage = _usage(record.get("usage"))
    return Answer("chatcmpl", {"object": "chat.completion", "choices": choices, "usage": usage})


def answer_line(record: Mapping[str, Any], answer: Answer, model: str) -> dict[str, Any]:
    """The line for a row that was answered."""
    index = record["index"]
    return {
        "id": f"batch_req_{index}",
        "custom_id": record["id"],
        "response": {
            "status_code": 200,
            "request_id": f"req_{index}",
            "body": {
                "id": f"{answer.kind}-{index}",
                "created": _unix_s(record.get("finished_at")),
                "model": model,
                **answer.parts,
            },
        },
        "error": None,
    }


def error_line(record: Mapping[str, Any]) -> dict[str, Any]:
    """The line for a row that failed."""
    error = record.get("error") or {}
    return {
        "id": f"batch_req_{record['index']}",
        "custom_id": record["id"],
        "response": None,
        "error": {"code": error.get("kind"), "message": error.get("message")},
    }


def _choice(number: int, choice: Mapping[str, Any]) -> dict[str, Any]:
    tokens = choice.get("logprobs")
    made = {
        "index": number,
        "message": _message(choice),
        "logprobs": None
        if tokens is None
        else {"content": [_token(token) for token in tokens], "refusal": None},
        "finish_reason": choice.get("finish_reason"),
    }
    if made["finish_reason"] not in _FINISH_REASONS:
        # OpenAI's clients refuse other values. OpenRouter uses this name for the original.
        made["native_finish_reason"] = made["finish_reason"]
        made["finish_reason"] = "length" if made["finish_reason"] in _CUT_OFF else "stop"
    return made


def _message(choice: Mapping[str, Any]) -> dict[str, Any]:
    """As vLLM's server has it: ``reasoning`` under that name, no content beside tool calls alone."""
    text, calls = choice.get("text"), choice.get("tool_calls")
    message = {"role": "assistant", "content": (text or None) if calls else text, "refusal": None}
    if calls:  # OpenAI's clients refuse one without an id, and some servers send none
        message["tool_calls"] = [
            {**call, "id": call.get("id") or f"call_{n}"} for n, call in enumerate(calls)
        ]
    if reasoning := choice.get("reasoning"):
        message["reasoning"] = reasoning
    return message


def _token(token: Mapping[str, Any]) -> dict[str, Any]:
    return {**_one(token), "top_logprobs": [_one(other) for other in token.get("top_logprobs", ())]}


def _one(token: Mapping[str, Any]) -> dict[str, Any]:
    """In the log, null means -inf, or the text of a token without text."""
    logprob = token["logprob"]
    return {
        "token": token["token"] or "",
        "bytes": None,  # not in the log, and a token may be part of a character
        "logprob": LEAST_LOGPROB if logprob is None else logprob,
    }


def _usage(usage: Mapping[str, int] | None) -> dict[str, Any] | None:
    if not usage:
        return None
    found: dict[str, Any] = {**usage}
    found["total_tokens"] = found["prompt_tokens"] + found["completion_tokens"]
    if (tokens := found.pop("reasoning_tokens", None)) is not None:
        found["completion_tokens_details"] = {"reasoning_tokens": tokens}
    return found


def _unix_s(finished_at: str | None) -> int:
    """0 if the record does not say."""
    try:
        return int(datetime.fromisoformat(finished_at or "").timestamp())
    except ValueError:
        return 0
