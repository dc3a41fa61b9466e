"""What a line of a log says: a record, or a generation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson

from batchkit.errors import StoreError
from batchkit.storage.schema import fault_in, fault_in_generation

RECORD_HEAD = b'{"index":'
POOLED = ("embedding", "label", "score")  # what answers a row of a pooling task


def record_of(raw: bytes, fault: Callable[[Any], str | None] = fault_in) -> dict[str, Any] | None:
    """The record in the line ``raw``, newline included; None if it is not a record, by ``fault``."""
    if not raw.endswith(b"\n"):
        return None
    try:
        record: dict[str, Any] = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    return record if fault(record) is None else None


def generation_in(raw: bytes) -> dict[str, Any] | None:
    """The generation in the line ``raw``, newline included; None if it is not one."""
    return record_of(raw, fault_in_generation)


def whole_record(raw: bytes, path: Path, offset: int) -> dict[str, Any]:
    """The record in the line ``raw``, which begins at byte ``offset`` of ``path``.

    Raises:
        StoreError: it is damaged.
    """
    try:
        record: dict[str, Any] = orjson.loads(raw)
        fault = fault_in(record)
    except orjson.JSONDecodeError as error:
        fault = str(error)
    if fault is not None:
        raise StoreError(
            f"{path}: the record at byte {offset} is damaged: {fault}. `batchkit verify --repair"
            f" {path.parent}` sets it aside; its row is then run again"
        )
    return record


def failure_kind(record: Mapping[str, Any]) -> str | None:
    """The record's error kind; ``empty`` for an ok record without an answer; None for an answer."""
    if record["status"] == "failed":
        return str((record.get("error") or {}).get("kind", "unknown"))
    if any(record.get(name) is not None for name in POOLED):
        return None
    choices = record.get("choices") or [record]
    is_answer = any((c.get("text") or "").strip() or c.get("tool_calls") for c in choices)
    return None if is_answer else "empty"


def tokens_in(line: Mapping[str, Any]) -> tuple[int, int]:
    """Prompt and completion tokens of a record or of a generation, those of its earlier attempts
    included."""
    prompt_tokens = completion_tokens = 0
    for name in ("usage", "earlier_usage"):
        if usage := line.get(name):
            prompt_tokens += usage.get("prompt_tokens", 0)
            completion_tokens += usage.get("completion_tokens", 0)
    return prompt_tokens, completion_tokens
