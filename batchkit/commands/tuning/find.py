"""The ``find-bs`` command: finds the largest batch size that fits, and the one with the best throughput."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from batchkit.commands import Say
from batchkit.commands.trial import OK, OOM, trials_of
from batchkit.commands.tuning.known import KeptResults
from batchkit.commands.tuning.options import (
    KEY,
    SIZE,
    check_patch,
    most_of,
    patch,
    write_patch,
)
from batchkit.commands.tuning.table import Line, SizeTable
from batchkit.config.numbers import duration, number
from batchkit.config.tables import JobConfig
from batchkit.errors import JobError

COMMAND = "find-bs"
LEAST_GAIN = 0.03
_MOSTLY = 0.2  # share of idle engine slots above which waiting counts as the bottleneck
_LEAST_GROWTH = 1.5  # minimum ratio of two batch sizes to estimate the gain of a larger one


class Bottleneck(NamedTuple):
    """The resource that limits throughput, and a sentence with the numbers that show it."""

    resource: Literal["rendering", "preprocessing", "kv-cache", "decode", "prefill", "unknown"]
    reason: str


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search. A signal may have ended the search early.

    - ``rows``: number of rows of the whole job.
    - ``high``: the largest size that the search was allowed to try.
    - ``has_flattened``: True if the search stopped because a larger size gained too little.
    - ``written``: the job file that received the best size, or None.
    """

    table: SizeTable
    rows: int
    high: int
    has_flattened: bool
    bottleneck: Bottleneck | None
    written: Path | None

    @property
    def estimate_s(self) -> float | None:
        """The estimated seconds for the whole job at the best size, with the time for loading the engine."""
        best = self.table.best
        if best is None:
            return None
        answered = best["answered"] / (best["answered"] + sum(best["failed"].values()))
        seconds: float = best["load_seconds"] + self.rows * answered / best["rows_per_s"]
        return seconds

    @property
    def exit_code(self) -> int:
        return self.table.exit_code

    def to_json(self) -> dict[str, Any]:
        best, estimate = self.table.best, self.estimate_s
        return {
            **self.table.to_json(),
            "stopped_early": self.has_flattened,
            "rows": self.rows,
            "estimated_seconds": None if estimate is None else round(estimate, 1),
            "bottleneck": None if self.bottleneck is None else self.bottleneck._asdict(),
            "patch": None if best is None else patch({SIZE: best["batch_size"]}),
            "written": None if self.written is None else str(self.written),
        }

    def to_text(self) -> str:
        best, estimate = self.table.best, self.estimate_s
        lines = [self.table.to_text()]
        if best is None or estimate is None:
            return "\n".join([*lines, "no batch size is known to fit"])
        size = best["batch_size"]
        if best["failed"]:
            kinds = ", ".join(f"{n:,} {kind}" for kind, n in best["failed"].items())
            lines.append(f"rows that failed at {size:,}, and were not counted: {kinds}")
        loading = f"of which {duration(best['load_seconds'])} to load the model"
        lines += [
            f"best: {size:,} ({number(best['rows_per_s'])} rows/s)",
            f"largest that fits: {self._largest()}",
            f"the whole job, {self.rows:,} rows, at {size:,}: about {duration(estimate)}, {loading}",
        ]
        if self.bottleneck is not None:
            lines.append(f"bottleneck: {self.bottleneck.resource}: {self.bottleneck.reason}")
        if self.written is not None:
            lines.append(f"{self.written}: {KEY} = {size} written")
        else:
            lines.append(f"set this in the job file (--write does it):\n\n{patch({SIZE: size})}")
        return "\n".join(lines)

    def _largest(self) -> str:
        largest: int = self.table.ok[-1]["batch_size"]
        if self.table.signum is not None:
            return f"{largest:,} so far; the search was interrupted"
        if self.has_flattened:
            return f"{largest:,} or more; the search stopped because twice the size was less than {LEAST_GAIN:.0%} faster"
        too_large = [line["batch_size"] for line in self.table.lines if line["status"] == OOM]
        if largest + 1 in too_large:
            return f"{largest:,}; {largest + 1:,} runs out of memory"
        return f"{largest:,}" + (", the largest that was tried" if largest == self.high else "")


def find_batch_size(
    job: JobConfig,
    *,
    low: int,
    high: int,
    rows: int | None,
    seconds: float,
    write_to: Path | None = None,
    say: Say = lambda text: None,
) -> SearchResult:
    """Search batch sizes from ``low`` to ``high``. A signal ends the search with the results so far.

    Each size is measured in a run that is kept, and the results are stored beside these runs (``trials_folder``). The
    next call with the same job, ``rows`` and ``seconds`` measures only sizes that have no result.

    - ``rows``, ``seconds``: limits for each trial: how many rows it uses, and how long it measures.
    - ``write_to``: job file that receives the best size, if the search was complete.

    Raises:
        JobError: The job itself is invalid, its input has no rows, or the job file can't be written.
    """
    if low > high:
        raise JobError(f"--low {low} is over --high {high}; lower --low or raise --high")
    table = SizeTable(job, KeptResults(job, COMMAND, rows, seconds), say)
    has_flattened, written = False, None
    if write_to is not None:
        check_patch(write_to)
    with trials_of(job, rows, COMMAND) as trials:
        most, why = most_of(job, trials.rows)
        if most < high:
            high = max(low, most)
            say(f"batch sizes up to {high:,} are tried: {why}")
        if job.engine.kind == "openai-server":
            say(
                "the server keeps its cache between trials, so later trials may look faster than they are"
            )
        has_flattened = search(low, high, lambda size: table.run(trials, size, seconds))
    table.signum = trials.signum
    best, bottleneck = table.best, None
    if best is not None:
        bottleneck = bottleneck_of(table.lines, best, with_images=bool(job.prompt.images))
    if write_to is not None and best is not None and table.signum is None:
        write_patch(write_to, {SIZE: best["batch_size"]})
        written = write_to
    return SearchResult(table, trials.total, high, has_flattened, bottleneck, written)


def search(low: int, high: int, try_size: Callable[[int], Line]) -> bool:
    """Double the size from ``low`` until it does not fit, then search between the largest size that fits and the
    smallest that does not.

    Returns True if the search stopped because a doubling raised the rows per second by less than 3 %; larger sizes may
    also fit. Otherwise the largest size up to ``high`` that fits was tried. No size is tried twice.

    ``try_size``: measures a size and returns its result.
    """
    fits, size, best = 0, low, 0.0
    while (found := try_size(size))["status"] == OK:
        is_flat = found["typical"] and found["rows_per_s"] < best * (1 + LEAST_GAIN)
        fits, best = size, max(best, found["rows_per_s"])
        if size >= high or is_flat:
            return size < high
        size = min(2 * size, high)
    too_large = size
    while fits and too_large - fits > 1:
        size = (fits + too_large) // 2
        if try_size(size)["status"] != OK:
            too_large = size
        else:
            fits = size
    return False


def bottleneck_of(lines: Sequence[Line], best: Line, *, with_images: bool) -> Bottleneck:
    """Return the bottleneck at the ``best`` size. ``lines``: the measurements of all sizes."""
    if best["waits"] is None and not best["typical"]:
        return Bottleneck(
            "unknown", "the engine was not full for long enough to show the bottleneck"
        )
    waits = best["waits"] or dict.fromkeys(("rendering", "preparing", "kv_cache"), 0.0)
    if waits["rendering"] > _MOSTLY:
        what = "images are opened and prompts rendered" if with_images else "prompts are rendered"
        return Bottleneck(
            "rendering",
            f"{waits['rendering']:.0%} of the engine's slots were empty because no row was ready: {what} too"
            " slowly",
        )
    if waits["preparing"] > _MOSTLY:
        what = "tokenized, and images preprocessed," if with_images else "tokenized"
        return Bottleneck(
            "preprocessing",
            f"{waits['preparing']:.0%} of the engine's slots were empty although rows were waiting: prompts are"
            f" {what} in the engine on one thread, too slowly",
        )
    if waits["kv_cache"] > _MOSTLY:
        again = best["preempted"] / max(1, best["rows"])
        return Bottleneck(
            "kv-cache",
            f"the KV cache was full for {waits['kv_cache']:.0%} of the time, {best['running']:.0f} of"
            f" {best['batch_size']:,} requests ran at once, and {again:.0%} of them were preempted and restarted:"
            " run fewer requests, give the cache more memory, or reduce max_model_len",
        )
    return _compute(lines, best)


def _compute(lines: Sequence[Line], best: Line) -> Bottleneck:
    """Return the bottleneck of an engine that is busy computing: the forward passes themselves, the prompts or the
    answers.

    A row takes ``a + b / batch`` seconds. ``a`` is the time for its tokens, at any batch size. ``b`` is the time for
    forward passes, which all rows of a batch share. If ``b / batch`` is at least half, a larger batch helps. Pooling
    tasks have no output tokens: all their forward passes are prefill.
    """
    prompt, output = best["prompt_tokens_per_s"], best["completion_tokens_per_s"]
    if not prompt or output is None:
        return Bottleneck("unknown", "the engine did not count its tokens")
    tokens = f"{prompt:,.0f} prompt and {output:,.0f} output tokens/s"
    shared = _shared_by_batch(lines, best)
    if shared >= 0.5:
        return Bottleneck(
            "decode" if output else "prefill",
            f"{shared:.0%} of a row's time is for forward passes that the whole batch shares, so a larger batch"
            f" would be faster ({tokens})",
        )
    if prompt > output:
        return Bottleneck("prefill", f"most tokens are prompt tokens ({tokens})")
    return Bottleneck("decode", f"most tokens are output tokens ({tokens})")


def _shared_by_batch(lines: Sequence[Line], best: Line) -> float:
    """Return the share of a row's time that is for forward passes, which the batch shares; 0 if it can't be computed.

    It is computed from the rates at ``best`` and at the next clearly smaller size.
    """
    size, best_s = best["batch_size"], 1 / best["rows_per_s"]
    smaller = [
        line for line in lines if line["rows_per_s"] and size >= _LEAST_GROWTH * line["batch_size"]
    ]
    if not smaller:
        return 0.0
    other = max(smaller, key=lambda line: line["batch_size"])
    b = (1 / other["rows_per_s"] - best_s) / (1 / other["batch_size"] - 1 / size)
    share: float = b / size / best_s
    return min(1.0, max(0.0, share))
