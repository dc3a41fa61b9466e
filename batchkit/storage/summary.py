"""How a start of a run ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from batchkit.storage.ledger import RESULTS, read_newest


@dataclass(frozen=True, slots=True)
class RunSummary:
    """How a start ended. ``ok`` and ``failed`` count the whole job; the rest counts this start.

    ``skipped`` rows were settled before it began; ``retried`` counts further attempts within it;
    ``seconds`` is the time with the engine up, without loading. ``exit`` is the exit code: 0 all
    rows ok, 3 some failed, 1 stopped by an error or rows without a record remain, 130 and 143
    interrupted.
    """

    name: str
    folder: str
    total: int
    ok: int
    failed: int
    skipped: int
    retried: int
    seconds: float
    load_seconds: float
    prompt_tokens: int
    completion_tokens: int
    rows_per_s: float
    completion_tokens_per_s: float
    exit: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def records(self) -> Iterator[dict[str, Any]]:
        """The newest record of each row, in the order of the input."""
        return read_newest(Path(self.folder) / RESULTS)
