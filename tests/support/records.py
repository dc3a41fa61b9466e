"""Records, as a run would have made them."""

from __future__ import annotations

from typing import Any

from batchkit.types import ErrorInfo, Record, Usage


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
        fields=fields or {},
        input_hash="0123456789abcdef",
    )
