"""How a start of a run ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from batchkit.storage.ledger import RESULTS
from batchkit.storage.newest import read_newest


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

    def to_text(self, *, if_failed: str) -> str:
        """A few lines; ``if_failed`` is the next command if some rows failed."""
        done = f"{self.ok:,} ok, {self.failed:,} failed of {self.total:,} rows"
        rates = f"{self.rows_per_s:.1f} rows/s, {self.completion_tokens_per_s:,.0f} output tok/s"
        lines = [f"{done}; {self.skipped:,} were done before; {self.seconds:.1f} s, {rates}"]
        if self.exit in (130, 143):
            lines.append("interrupted; run the same command to continue")
        elif self.exit == 1:
            lines.append("rows without a record remain; next: batchkit run")
        elif self.failed:
            lines.append(
                f"some rows failed, and error.message in their records says why; next: {if_failed}"
            )
        return "\n".join([*lines, f"results in {self.folder}/{RESULTS}"])

    def records(self) -> Iterator[dict[str, Any]]:
        """The newest record of each row, in the order of the input."""
        return read_newest(Path(self.folder) / RESULTS)
