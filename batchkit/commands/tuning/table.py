"""The table of measured batch sizes, as text and as JSON."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from batchkit.commands import Say
from batchkit.commands.trial import OK, OOM, Trial, Trials
from batchkit.commands.trial.measurement import Figures
from batchkit.commands.tuning.options import KEY, SIZE, with_options
from batchkit.config.numbers import number
from batchkit.config.tables import JobConfig
from batchkit.scoring.metrics import markdown

Line = dict[str, Any]
"""The JSON of one batch size (see ``line_of``)."""
_HEADS = (
    *("batch size", "status", "time", "rows/s", "spread", "prompt tok/s", "output tok/s"),
    *("p50 ms", "p99 ms", "peak memory"),
)
_RATES = ("rows_per_s", "prompt_tokens_per_s", "completion_tokens_per_s", "p50_ms", "p99_ms")


def line_of(batch_size: int, trials: Sequence[Trial]) -> Line:
    """Return the results of one batch size as a dict for JSON: medians over its ``trials``. Numbers are None if a trial
    failed.

    - ``spread``: half the difference between the slowest and the fastest round, as a share of the median.
    - ``typical``: True if the engine was as busy as in the whole job.
    - ``reason``: why an engine died.
    """
    status = next((trial.status for trial in trials if trial.status != OK), OK)
    rounds = [t.figures for t in trials if t.figures is not None and status == OK]
    rates = [found.rows_per_s for found in rounds]
    failed = sum((trial.failed for trial in trials), Counter[str]())
    memory = max((t.memory for t in trials if t.memory is not None), default=None)
    idle = trials[-1].idle
    return {
        "batch_size": batch_size,
        "status": status,
        "reason": next((trial.reason for trial in trials if trial.reason), None),
        "seconds": round(sum(r.seconds for r in rounds) or sum(t.seconds for t in trials), 3),
        **{name: _median(rounds, name) for name in _RATES},
        "memory_gb": None if memory is None else round(memory.gb, 3),
        "memory_of": None if memory is None else memory.of,
        "load_seconds": round(statistics.median(trial.load_s for trial in trials), 3),
        "rows": sum(found.rows for found in rounds),
        "answered": sum(trial.answered for trial in trials),
        "failed": dict(failed),
        "typical": bool(rounds) and all(found.is_typical for found in rounds),
        "spread": _spread(rates) if len(rates) > 1 else None,
        "running": None if idle is None else round(idle.running, 2),
        "preempted": None if idle is None else idle.preempted,
        "waits": None
        if idle is None
        else {n: round(getattr(idle, n), 4) for n in idle._fields[:3]},
        "rounds": [
            {"seconds": round(found.seconds, 3), "rows": found.rows}
            | {name: _median([found], name) for name in _RATES}
            for found in rounds
        ],
    }


def _median(rounds: Sequence[Figures], name: str) -> float | None:
    values = [getattr(found, name) for found in rounds]
    return float(f"{statistics.median(values):.6g}") if values else None


def _spread(rates: Sequence[float]) -> float:
    return round((max(rates) - min(rates)) / 2 / statistics.median(rates), 4)


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
    memory, spread = line["memory_gb"], line["spread"]
    return [
        f"{line['batch_size']:,}",
        line["status"].partition(":")[0],
        f"{line['seconds']:.1f} s",
        number(line["rows_per_s"]),
        "" if spread is None else f"±{spread:.0%}",
        *(number(line[name]) for name in _RATES[1:]),
        "" if memory is None else f"{memory:.2f} GiB {line['memory_of']}",
    ]


class SizeTable:
    """The batch sizes of ``job`` that were measured, with their trials.

    ``signum``: the signal that ended the measurements early, or None.
    """

    def __init__(self, job: JobConfig, say: Say) -> None:
        self._job, self._say = job, say
        self.trials: dict[int, list[Trial]] = {}
        self.signum: int | None = None
        say(f"{KEY}: how many requests the engine runs at once")

    def run(self, trials: Trials, size: int, seconds: float) -> Trial:
        """Run one more trial with the batch size ``size``, and print its result.

        Raises:
            JobError: The first trial finds the job invalid, or its rows can't be read.
        """
        self._say(f"batch size {size:,}: starting an engine")
        trial = trials.run(with_options(self._job, {SIZE: size}), size, seconds)
        self.trials.setdefault(size, []).append(trial)
        self._say(in_words(line_of(size, [trial])))
        return trial

    @property
    def lines(self) -> Sequence[Line]:
        """One line for each size, the smallest first."""
        return [line_of(size, self.trials[size]) for size in sorted(self.trials)]

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
                f"batch size {', '.join(hasty)}: not full for long enough to show how fast it is in a long"
                " run: give it more --seconds, or more rows"
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
