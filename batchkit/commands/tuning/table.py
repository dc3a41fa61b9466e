"""The table of measured batch sizes, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from batchkit.commands import Say
from batchkit.commands.trial import OK, OOM, Trial, Trials
from batchkit.commands.tuning.known import KeptResults
from batchkit.commands.tuning.options import KEY, SIZE, with_options
from batchkit.config.numbers import number
from batchkit.config.tables import JobConfig
from batchkit.scoring.metrics import markdown

Line = dict[str, Any]
"""The JSON of one batch size (see ``line_of``)."""
_HEADS = (
    *("batch size", "status", "time", "rows/s", "prompt tok/s", "output tok/s"),
    *("p50 ms", "p99 ms", "peak memory"),
)
_RATES = ("rows_per_s", "prompt_tokens_per_s", "completion_tokens_per_s", "p50_ms", "p99_ms")


def line_of(batch_size: int, trial: Trial) -> Line:
    """Return the result of one batch size as a dict for JSON. Rates and latencies are None if the trial failed.

    - ``typical``: True if the engine was as busy as in the whole job.
    - ``reason``: why an engine died.
    """
    found, idle, memory = trial.figures, trial.idle, trial.memory
    seconds = trial.seconds if found is None else found.seconds
    waits = idle and {name: round(getattr(idle, name), 4) for name in idle._fields[:3]}
    return {
        "batch_size": batch_size,
        "status": trial.status,
        "reason": trial.reason or None,
        "seconds": round(seconds, 3),
        **{name: found and float(f"{getattr(found, name):.6g}") for name in _RATES},
        "memory_gb": None if memory is None else round(memory.gb, 3),
        "memory_of": None if memory is None else memory.of,
        "load_seconds": round(trial.load_s, 3),
        "rows": 0 if found is None else found.rows,
        "answered": trial.answered,
        "failed": dict(trial.failed),
        "typical": found is not None and found.is_typical,
        "running": idle and round(idle.running, 2),
        "preempted": idle and idle.preempted,
        "waits": waits,
    }


def in_words(line: Line) -> str:
    """Return the result of a batch size as one line of text."""
    found = line["status"]
    if found == OOM:
        found = f"{OOM}: {line['reason']}"
    elif found == OK:
        latency = f"p50 {line['p50_ms']:,.0f} ms, p99 {line['p99_ms']:,.0f} ms"
        found = f"{number(line['rows_per_s'])} rows/s, {latency}"
    return f"batch size {line['batch_size']:,}: {found}"


def _cells(line: Line) -> list[str]:
    """Return the cells of a table row. The status is cut to its first word; the reason is printed below the table."""
    memory = line["memory_gb"]
    return [
        f"{line['batch_size']:,}",
        line["status"].partition(":")[0],
        f"{line['seconds']:.1f} s",
        number(line["rows_per_s"]),
        *(number(line[name]) for name in _RATES[1:]),
        "" if memory is None else f"{memory:.2f} GiB {line['memory_of']}",
    ]


class SizeTable:
    """The batch sizes of ``job`` that were measured, and their results.

    ``kept``: stored results, which are not measured again. ``signum``: the signal that ended the measurements early, or
    None.
    """

    def __init__(self, job: JobConfig, kept: KeptResults, say: Say) -> None:
        self._job, self._kept, self._say = job, kept, say
        self._earlier: dict[int, Line] = {line["batch_size"]: line for line in kept.lines}
        self._found: dict[int, Line] = {}
        self.signum: int | None = None
        say(f"{KEY}: how many requests the engine runs at once")

    def run(self, trials: Trials, size: int, seconds: float) -> Line:
        """Return the result of the batch size ``size``, and print it. Measure the size unless its result was stored.

        Raises:
            JobError: The first trial finds the job invalid, or its rows can't be read.
        """
        line = self._earlier.get(size)
        if line is None:
            self._say(f"batch size {size:,}: starting an engine")
            line = line_of(size, trials.run(with_options(self._job, {SIZE: size}), size, seconds))
            self._kept.keep(line)
            self._say(in_words(line))
        else:
            self._say(f"{in_words(line)}; measured before")
        self._found[size] = line
        return line

    @property
    def lines(self) -> Sequence[Line]:
        """One line for each size, the smallest first."""
        return [self._found[size] for size in sorted(self._found)]

    @property
    def ok(self) -> Sequence[Line]:
        """The lines of the sizes that fit."""
        return [line for line in self.lines if line["status"] == OK]

    @property
    def best(self) -> Line | None:
        """The line of the size with the most rows per second; None if no size fits."""
        return max(self.ok, key=lambda line: line["rows_per_s"], default=None)

    @property
    def exit_code(self) -> int:
        if self.signum is not None:
            return 128 + self.signum
        return 0 if self.ok else 1

    def to_text(self) -> str:
        lines = [markdown(_HEADS, [*map(_cells, self.lines)])]
        lines += [in_words(line) for line in self.lines if line["status"] != OK]
        if hasty := [f"{line['batch_size']:,}" for line in self.ok if not line["typical"]]:
            lines.append(
                f"batch size {', '.join(hasty)}: the engine was not full for long enough to show the rate of a long"
                " run; raise --seconds, or use more rows"
            )
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "batch_sizes": [*self.lines],
            "best": None if self.best is None else self.best["batch_size"],
            "largest": max((line["batch_size"] for line in self.ok), default=None),
            "name": self._job.name,
            "model": self._job.engine.model or self._job.engine.kind,
            "option": KEY,
            "interrupted": self.signum is not None,
        }
