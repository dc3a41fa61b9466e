"""The scores of a run, and how the values of its ``input.cross`` compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from batchkit.runs.compare import compare_values
from batchkit.runs.comparison import Comparison
from batchkit.scoring.metrics import ScoreTable


class Scores(NamedTuple):
    """``comparison`` is None if the run has no two values, or no scores."""

    table: ScoreTable
    comparison: Comparison | None

    @classmethod
    def of(cls, table: ScoreTable, folder: Path) -> Scores:
        return cls(table, compare_values(folder))

    def to_json(self) -> dict[str, Any]:
        values = {} if self.comparison is None else {"values": self.comparison.to_json()}
        return {**self.table.to_json(), **values}

    def to_text(self) -> str:
        parts = [self.table.to_text()]
        if self.comparison is not None:
            parts.append(self.comparison.to_text())
        return "\n\n".join(parts)
