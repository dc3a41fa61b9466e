"""What a run took: tokens, time, rates and price."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from batchkit.runs.status import counts_of
from batchkit.storage.job_toml import job_of_run
from batchkit.storage.metrics import read_metrics
from batchkit.storage.starts import read_history


class Rates(NamedTuple):
    """Tokens, time and price of a run, over all its starts.

    ``seconds``: time with a loaded engine; 0 if unknown. ``price``: None if the job has no price.
    """

    ok: int
    failed: int
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    price: float | None

    @classmethod
    def of(cls, folder: Path) -> Rates:
        """Read the checkpoint and ``metrics.jsonl``. Raises StoreError if the run can't be read."""
        found = counts_of(folder)
        starts = groupby(read_metrics(folder), key=lambda line: line.start)
        # The first line of a start is written when its engine is loaded.
        seconds = sum(lines[-1].seconds - lines[0].seconds for lines in ([*of] for _, of in starts))
        gpu_seconds = sum(start.gpu_seconds for start in read_history(folder).starts)
        price = job_of_run(folder).budget.price_of(found.tokens, gpu_seconds)
        return cls(
            found.totals.ok,
            found.totals.failed,
            found.tokens.prompt_tokens,
            found.tokens.completion_tokens,
            round(seconds, 3),
            price,
        )

    @property
    def rows_per_s(self) -> float | None:
        return (self.ok + self.failed) / self.seconds if self.seconds else None

    @property
    def completion_tokens_per_s(self) -> float | None:
        return self.completion_tokens / self.seconds if self.seconds else None

    def to_json(self) -> dict[str, Any]:
        rates = {name: getattr(self, name) for name in ("rows_per_s", "completion_tokens_per_s")}
        return {**self._asdict(), **{n: rate and round(rate, 3) for n, rate in rates.items()}}
