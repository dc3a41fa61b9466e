"""Records, as a run would have made them, and stores that hold them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Raw

from batchkit.storage.checkpoint import Totals
from batchkit.storage.ledger import Ledger, RecordLine, line_of
from batchkit.storage.log import RESULTS
from batchkit.storage.newest_lines import read_newest
from batchkit.storage.plain_json import encoded
from batchkit.storage.steps import GenerationLine, generation_line
from batchkit.types import Call, Choice, Completion, ErrorInfo, Record, Request, Row, Usage


def record(
    index: int, text: str | None = "yes", *, kind: str = "template", fields: Any = None
) -> Record:
    """An ok record; a failed one where ``text`` is None."""
    return Record(
        index=index,
        id=f"q{index}",
        status="failed" if text is None else "ok",
        attempt=1,
        text=text,
        finish_reason=None if text is None else "stop",
        usage=None if text is None else Usage(3, 2),
        latency_s=0.25,
        finished_at="2026-11-21T01:02:03.456Z",
        error=ErrorInfo(kind, "TemplateError", "no", False) if text is None else None,
        fields=Raw(encoded(fields or {})[:-1]),
        input_hash="0123456789abcdef",
    )


def generation(index: int, text: str = "yes", step: str = "draft") -> GenerationLine:
    """One that the row was answered."""
    row = Row(index, f"q{index}", {})
    call = Call(step, 0)
    request = Request(row, None, text, {}, "", call=call, request_hash="0" * 32)
    return generation_line(Completion(request, [Choice(text, "stop")], Usage(3, 2), 0.25))


def write(folder: Path, *records: Record) -> bytes:
    """A closed store that holds ``records``; the bytes of its log."""
    folder.mkdir(exist_ok=True)
    ledger = Ledger(folder)
    for one in records:
        ledger.write([line_of(one)])
    ledger.close()
    return (folder / RESULTS).read_bytes()


def indexes(folder: Path) -> list[int]:
    return [found["index"] for found in read_newest(folder / RESULTS)]


def reopened(folder: Path) -> dict[str, Any]:
    """What a new start reads from ``folder``."""
    ledger = Ledger(folder)
    found = facts(ledger.totals)
    ledger.close()
    return found


def facts(totals: Totals) -> dict[str, Any]:
    return {
        "completed": list(totals.completed),
        "failed_by_kind": {k: list(rows) for k, rows in totals.failed_by_kind.items() if len(rows)},
        "records": totals.records,
        "tokens": (totals.prompt_tokens, totals.completion_tokens),
        "ok": totals.ok,
        "failed": totals.failed,
    }


def with_vector(index: int, dimensions: int = 4, dtype: str = "float32") -> RecordLine:
    """A record of an embed run; each row has a vector of its own."""
    made = record(index)
    made.text = None
    return line_of(made, vector(index, dimensions).tobytes(), dtype)


def vector(index: int, dimensions: int = 4) -> np.ndarray[Any, Any]:
    return (np.arange(dimensions, dtype=np.float32) + index) / 8


def written(folder: Path, *rows: int, dtype: str = "float32", dimensions: int = 4) -> None:
    """A start that appends embed records of ``rows``, and ends."""
    folder.mkdir(exist_ok=True)
    ledger = Ledger(folder)
    for row in rows:
        ledger.write([with_vector(row, dimensions, dtype)])
    ledger.close()
