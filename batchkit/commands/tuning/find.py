"""``batchkit find-bs``: the largest batch size that fits, and the one with the best throughput."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from batchkit.commands.trial import Say
from batchkit.commands.tuning.batch_size_option import (
    BatchSizeOption,
    check_patch,
    patch,
    write_patch,
)
from batchkit.commands.tuning.bottleneck import Bottleneck, Rendered, bottleneck_of
from batchkit.commands.tuning.rounds import ENOUGH_ROWS, Budget
from batchkit.commands.tuning.table import HEADER, OOM, SizeResult, SizeTable
from batchkit.commands.tuning.trial import Trials, trials_of, with_one_prompt
from batchkit.config.numbers import duration, number
from batchkit.config.tables import JobConfig
from batchkit.errors import JobError

LEAST_GAIN = 0.03


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result so far. ``rows``: of the whole job. ``high``: the largest size that could be
    tried. ``written``: the job file that has the best size now."""

    option: BatchSizeOption
    table: SizeTable
    rows: int
    high: int
    has_flattened: bool
    rendered: Rendered | None
    written: Path | None

    @property
    def estimate_s(self) -> float | None:
        """The whole job at the best size, including the engine's load."""
        best = self.table.best
        if best is None or not best.rows_per_s:
            return None
        answered = best.answered / (best.answered + best.failed.total())
        return best.load_s + self.rows * answered / best.rows_per_s

    @property
    def bottleneck(self) -> Bottleneck | None:
        best = self.table.best
        if best is None or self.rendered is None:
            return None
        return bottleneck_of(self.table.lines, best, self.rendered)

    @property
    def exit_code(self) -> int:
        return self.table.exit_code

    def to_json(self) -> dict[str, Any]:
        best, bottleneck = self.table.best, self.bottleneck
        estimate = self.estimate_s
        return {
            **self.table.to_json(),
            "stopped_early": self.has_flattened,
            "rows": self.rows,
            "estimated_seconds": None if estimate is None else round(estimate, 1),
            "render_rows_per_s": None if self.rendered is None else round(self.rendered.per_s, 3),
            "bottleneck": None if bottleneck is None else bottleneck._asdict(),
            "patch": None if best is None else patch(self.option, best.batch_size),
            "written": None if self.written is None else str(self.written),
        }

    def to_text(self) -> str:
        """The text below the table: one sentence per line."""
        best, largest = self.table.best, self.table.largest
        if best is None or largest is None:
            return "\n".join(["no batch size is known to fit", *self._problems(with_memory=True)])
        lines = [f"best: {best.batch_size:,} ({number(best.rows_per_s)} rows/s)"]
        lines.append(f"largest that fits: {self._largest(largest)}")
        if self.estimate_s is not None:
            load = duration(best.load_s)
            estimate = f"{duration(self.estimate_s)}, of which {load} to load the model"
            lines.append(
                f"the whole job, {self.rows:,} rows, at {best.batch_size:,}: about {estimate}"
            )
        if self.bottleneck is not None:
            lines.append(f"bottleneck: {self.bottleneck.resource}: {self.bottleneck.reason}")
        lines += self._problems()
        if self.written is not None:
            lines.append(f"{self.written}: {self.option.key} = {best.batch_size} written")
        else:
            lines.append(
                f"in the job file (or with --write):\n\n{patch(self.option, best.batch_size)}"
            )
        return "\n".join(lines)

    def _largest(self, largest: SizeResult) -> str:
        size = f"{largest.batch_size:,}"
        if self.table.signum is not None:
            return f"{size} so far; the search was interrupted"
        if self.has_flattened:
            return f"{size} or more; the search stopped as twice the size gained under {LEAST_GAIN:.0%}"
        too_large = self.table.smallest_too_large
        if too_large is not None and too_large.batch_size == largest.batch_size + 1:
            return f"{size}; {too_large.batch_size:,} runs out of memory"
        return size + (", the largest that was tried" if largest.batch_size == self.high else "")

    def _problems(self, *, with_memory: bool = False) -> list[str]:
        """Failed sizes and rows; out of memory only ``with_memory``: it just ends a search."""
        found = [
            f"batch size {line.batch_size:,}: {line.status_text}"
            for line in self.table.lines
            if not line.rounds and (with_memory or line.status != OOM)
        ]
        best = self.table.best
        if best is not None and best.failed:
            kinds = ", ".join(f"{n:,} {kind}" for kind, n in best.failed.items())
            found.append(f"rows that failed at {best.batch_size:,}, and were not counted: {kinds}")
        return found + self.table.doubts()


def find_batch_size(
    job: JobConfig,
    *,
    low: int,
    high: int,
    rows: int | None,
    seconds: float,
    write_to: Path | None = None,
    say: Say = lambda text: None,
    show: Say = lambda text: None,
) -> SearchResult:
    """Search from ``low`` to ``high``. At most ``rows`` rows and ``seconds`` s of answers a trial.

    ``say`` gets progress, ``show`` the table as it grows, line by line. A signal ends the search
    with the results so far. The best size is written only to the job file ``write_to``, and only
    if the search was not ended early.

    Raises:
        JobError: the job itself is invalid, its input has no rows, or it can't be written.
    """
    job = with_one_prompt(job, say)
    if low > high:
        raise JobError(f"--low {low} is over --high {high}")
    rendered, flattened, written = None, False, None
    with trials_of(job, rows=rows, say=say) as trials:
        if write_to is not None:
            check_patch(write_to, trials.option)
        high = _highest(trials, low, high, say)
        say(f"{trials.option.key}: {trials.option.reason}")
        if job.engine.kind == "openai-server":
            say("the server keeps what it has cached: later trials may look faster than they are")

        def rate_of(size: int) -> Rate | None:
            line = trials.run(size, Budget(seconds))
            if len(trials.done) == 1:
                show(HEADER)
            show(line.to_text())
            if line.rows_per_s is None:
                return None
            return Rate(line.rows_per_s, line.is_typical and line.rows >= ENOUGH_ROWS)

        rendered = Rendered(trials.rendered_per_s(seconds), bool(job.prompt.images))
        flattened = search(low, high, rate_of)
    table, option = trials.table, trials.option
    if write_to is not None and table.best is not None and table.signum is None:
        write_patch(write_to, option, table.best.batch_size)
        written = write_to
    return SearchResult(option, table, trials.total, high, flattened, rendered, written)


def _highest(trials: Trials, low: int, high: int, say: Say) -> int:
    """``high``, or less if fewer can run at once: too few rows, or another option's limit."""
    option = trials.option
    limits = (trials.rows, f"there are {trials.rows:,} rows"), (option.most, option.reason)
    for most, why in limits:
        if most is not None and most < high:
            high = most
            if high <= low:
                say(f"only batch size {low:,} is tried: {why}")
            else:
                say(f"batch sizes up to {high:,} are tried: {why}")
    return max(high, low)


class Rate(NamedTuple):
    """Throughput of a size that fits. ``is_sure``: on so many rows that 3 % more is not chance."""

    per_s: float
    is_sure: bool = True


def search(low: int, high: int, rate_of: Callable[[int], Rate | None]) -> bool:
    """Try sizes from ``low`` by doubling, then by halving the gap between what fits and what does not.

    ``rate_of`` tries a size: its throughput, or None if it does not fit. No size is tried twice.
    Returns True if it stopped because a doubling surely gained less than 3 %: then larger sizes may
    fit, too. Else the largest size up to ``high`` that fits was tried, if any does and a size fits
    whenever a larger one does.
    """
    fits, size = 0, low
    best = Rate(0.0)
    while (rate := rate_of(size)) is not None:
        is_flat = rate.per_s < best.per_s * (1 + LEAST_GAIN)
        has_flattened = is_flat and rate.is_sure and best.is_sure
        fits, best = size, max(best, rate)
        if size >= high or has_flattened:
            return size < high
        size = min(2 * size, high)
    too_large = size
    while fits and too_large - fits > 1:
        size = (fits + too_large) // 2
        if rate_of(size) is None:
            too_large = size
        else:
            fits = size
    return False
