"""Reading ``results.jsonl``: its lines, and what a line says."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from batchkit.errors import StoreError
from batchkit.storage.schema import fault_in

RESULTS = "results.jsonl"
IS_MISSING = "is missing; its rows must be run again: batchkit run --fresh"
REQUEUE = ".requeue"  # a folder beside the log: holds what will replace the log
RECORD_HEAD = b'{"index":'
POOLED = ("embedding", "label", "score")  # what answers a row of a pooling task


class LogLine(NamedTuple):
    """One line of the log; ``record`` is None if the bytes are not a record.

    ``offset`` and ``end`` are byte positions, ``end`` behind the newline (or at the end of the
    file if the newline is missing: such a line is torn and never a record).
    """

    offset: int
    end: int
    record: dict[str, Any] | None


def log_of(folder: Path) -> Path:
    """The path of a run's log.

    Raises:
        StoreError: it is missing, or it is being replaced.
    """
    path = folder / RESULTS
    if os.path.lexists(folder / REQUEUE):
        raise StoreError(
            f"{folder}: --on-change requeue was interrupted while it replaced {RESULTS}; run the"
            " job again to finish it"
        )
    if not path.is_file():
        raise StoreError(f"{path}: {IS_MISSING}")
    return path


def read_lines(
    path: Path,
    offset: int = 0,
    parse: Callable[[bytes], dict[str, Any] | None] | None = None,
) -> Iterator[LogLine]:
    """The log's lines from byte ``offset`` on, in the order in which they were written; ``parse`` is
    ``record_of`` unless another file is read."""
    parse = parse or record_of
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(offset)
        for raw in file:
            end = offset + len(raw)
            yield LogLine(offset, end, parse(raw))
            offset = end


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


def record_of(raw: bytes, fault: Callable[[Any], str | None] = fault_in) -> dict[str, Any] | None:
    """The record in the line ``raw``, newline included; None if it is not a record, by ``fault``."""
    if not raw.endswith(b"\n"):
        return None
    try:
        record: dict[str, Any] = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    return record if fault(record) is None else None
