"""What a run may cost: ``run.max_seconds``, ``run.max_completion_tokens`` and ``run.max_price``.

Seconds are those of one start: a slot on a machine ends for each start anew. Tokens and price are
those of the run: what earlier starts have spent is spent.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from batchkit.config.numbers import number
from batchkit.config.tables import JobConfig
from batchkit.execution.signals import DRAIN_S
from batchkit.types import Usage

_HOUR_S = 3600.0


class Budgets:
    """The budgets of ``job`` in a start that ``began`` then by ``clock``, after earlier starts that
    held GPUs for ``gpu_seconds_before``. Tokens are those of all records, over all starts."""

    def __init__(
        self,
        job: JobConfig,
        began: float,
        gpu_seconds_before: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._gpus = job.run, job.gpus
        self._began = began
        self._gpu_seconds_before = gpu_seconds_before
        self._clock = clock

    @property
    def count_gpus(self) -> bool:
        """The seconds of GPUs have to outlive this process."""
        return self._run.price_per_gpu_hour is not None

    @property
    def gpu_seconds(self) -> float:
        """In this start so far."""
        return self._gpus * self._seconds

    def price(self, tokens: Usage) -> float | None:
        """Of the run so far; None if the job has no price."""
        run = self._run
        if run.price_per_gpu_hour is None and run.price_per_million_tokens is None:
            return None
        of_prompts, of_answers = run.price_per_million_tokens or (0.0, 0.0)
        millions = tokens.prompt_tokens * of_prompts + tokens.completion_tokens * of_answers
        gpu_hours = (self._gpu_seconds_before + self.gpu_seconds) / _HOUR_S
        return millions / 1e6 + gpu_hours * (run.price_per_gpu_hour or 0.0)

    def announced(self, tokens: Usage) -> str:
        """Every budget, and what is left of it; empty if there is none."""
        run, parts = self._run, list[str]()
        if run.max_seconds is not None:
            parts.append(f"run.max_seconds = {run.max_seconds:g} for this start")
        if (most := run.max_completion_tokens) is not None:
            left = max(0, most - tokens.completion_tokens)
            parts.append(f"run.max_completion_tokens = {most:,}, {left:,} left")
        if run.max_price is not None:
            left_of_price = max(0.0, run.max_price - (self.price(tokens) or 0.0))
            parts.append(f"run.max_price = {run.max_price:g}, {number(left_of_price)} left")
        return f"budget: {'; '.join(parts)}" if parts else ""

    def used_up(self, tokens: Usage) -> str | None:
        """The first budget that is used up, as ``run.max_seconds = 60``; None if none is.

        ``tokens`` include those of answers that have not ended: they are paid for, too.
        """
        run = self._run
        if run.max_seconds is not None and self._seconds >= run.max_seconds:
            return f"run.max_seconds = {run.max_seconds:g}"
        most = run.max_completion_tokens
        if most is not None and tokens.completion_tokens >= most:
            return f"run.max_completion_tokens = {most:,}"
        if run.max_price is not None and (self.price(tokens) or 0.0) >= run.max_price:
            return f"run.max_price = {run.max_price:g}"
        return None

    @property
    def drain_s(self) -> float | None:
        """Seconds that rows in flight still get; None: until they end."""
        if self._run.max_seconds is None or self._seconds < self._run.max_seconds:
            return None
        return max(0.0, self._run.max_seconds + DRAIN_S - self._seconds)

    @property
    def _seconds(self) -> float:
        return self._clock() - self._began
