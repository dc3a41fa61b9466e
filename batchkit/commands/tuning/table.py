"""The table of batch sizes, as text that grows line by line and as JSON."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from batchkit.commands.tuning.idle import Idle
from batchkit.commands.tuning.memory import Memory
from batchkit.commands.tuning.rounds import Round
from batchkit.commands.tuning.trial import OK, OOM, Trial
from batchkit.config.numbers import number


class _Column(NamedTuple):
    head: str
    width: int


_SPREAD = _Column("spread", 7)
_COLUMNS = (
    _Column("batch size", 10),
    _Column("status", 6),
    _Column("time", 8),
    _Column("rows/s", 9),
    _SPREAD,
    _Column("prompt tok/s", 12),
    _Column("output tok/s", 12),
    _Column("p50", 9),
    _Column("p99", 9),
    _Column("peak memory", 14),
)


@dataclass(frozen=True, slots=True)
class SizeResult:
    """One batch size, over all its trials. ``rounds`` is empty unless all of them succeeded."""

    batch_size: int
    status: str
    seconds: float
    rounds: tuple[Round, ...]
    load_s: float
    answered: int
    failed: Counter[str]
    memory: Memory | None
    idle: Idle | None
    is_typical: bool
    reason: str

    @classmethod
    def of(cls, trials: Sequence[Trial]) -> SizeResult:
        """``trials`` are of one size."""
        bad = next((trial.status for trial in trials if not trial.is_ok), OK)
        rounds = tuple(found for trial in trials for found in trial.rounds) if bad == OK else ()
        memories = [trial.memory for trial in trials if trial.memory is not None]
        return cls(
            batch_size=trials[0].batch_size,
            status=bad,
            seconds=sum(r.seconds for r in rounds) or sum(trial.seconds for trial in trials),
            rounds=rounds,
            load_s=statistics.median(trial.load_s for trial in trials),
            answered=sum(trial.answered for trial in trials),
            failed=sum((trial.failed or Counter() for trial in trials), Counter()),
            memory=max(memories, default=None),
            idle=trials[-1].idle,
            is_typical=all(trial.is_typical for trial in trials),
            reason=next((trial.reason for trial in trials if trial.reason), ""),
        )

    @property
    def rows(self) -> int:
        """Rows that were measured."""
        return sum(found.rows for found in self.rounds)

    @property
    def rows_per_s(self) -> float | None:
        return self.median("rows_per_s")

    @property
    def spread(self) -> float | None:
        """Half the difference between slowest and fastest round, as a share of the median."""
        rates = [found.rows_per_s for found in self.rounds]
        if len(rates) < 2:
            return None
        return (max(rates) - min(rates)) / 2 / statistics.median(rates)

    @property
    def status_text(self) -> str:
        """The status with its reason."""
        return f"{self.status}: {self.reason}" if self.status == OOM else self.status

    def median(self, name: str) -> float | None:
        """The median over the rounds of the figure ``name``."""
        values = [getattr(found, name) for found in self.rounds]
        return statistics.median(values) if values else None

    def to_json(self) -> dict[str, Any]:
        idle = self.idle
        return {
            "batch_size": self.batch_size,
            "status": self.status,
            "reason": self.reason or None,
            "seconds": round(self.seconds, 3),
            **{name: _rounded(self.median(name)) for name in _RATES},
            "memory_gb": None if self.memory is None else round(self.memory.gb, 3),
            "memory_of": None if self.memory is None else self.memory.of,
            "load_seconds": round(self.load_s, 3),
            "rows": self.rows,
            "failed": dict(self.failed),
            "typical": self.is_typical,
            "spread": _rounded(self.spread, 4),
            "running": None if idle is None else round(idle.running, 2),
            "preempted": None if idle is None else idle.preempted,
            "waits": None
            if idle is None
            else {
                "rendering": round(idle.rendering, 4),
                "preparing": round(idle.preparing, 4),
                "kv_cache": round(idle.kv_cache, 4),
            },
            "rounds": [
                {"seconds": round(found.seconds, 3), "rows": found.rows}
                | {name: _rounded(getattr(found, name)) for name in _RATES}
                for found in self.rounds
            ],
        }

    def to_text(self, *, with_spread: bool) -> str:
        cells = [f"{self.batch_size:,}", _short(self.status), f"{self.seconds:.1f} s"]
        if self.rounds:
            spread = "" if self.spread is None else f"±{self.spread:.0%}"
            cells += [number(self.rows_per_s), spread]
            cells += [number(self.median(n)) for n in ("prompt_tokens_per_s", _OUTPUT)]
            cells += [_time(self.median(name)) for name in ("p50_ms", "p99_ms")]
        else:
            cells += [""] * 6
        cells.append("" if self.memory is None else f"{self.memory.gb:.2f} GiB {self.memory.of}")
        return _joined(cells, with_spread=with_spread)


_OUTPUT = "completion_tokens_per_s"
_RATES = ("rows_per_s", "prompt_tokens_per_s", _OUTPUT, "p50_ms", "p99_ms")


@dataclass(frozen=True, slots=True)
class SizeTable:
    """One line per batch size, the smallest first."""

    lines: tuple[SizeResult, ...]

    @classmethod
    def of(cls, trials: Iterable[Trial]) -> SizeTable:
        by_size: dict[int, list[Trial]] = {}
        for trial in trials:
            by_size.setdefault(trial.batch_size, []).append(trial)
        return cls(tuple(SizeResult.of(by_size[size]) for size in sorted(by_size)))

    @property
    def best(self) -> SizeResult | None:
        """The size that answered most rows a second."""
        ok = [line for line in self.lines if line.rounds]
        return max(ok, key=lambda line: line.rows_per_s or 0.0, default=None)

    @property
    def largest(self) -> SizeResult | None:
        """The largest size that fitted."""
        return max((ln for ln in self.lines if ln.rounds), key=_size, default=None)

    @property
    def smallest_too_large(self) -> SizeResult | None:
        """The smallest size that ran out of memory."""
        return min((ln for ln in self.lines if ln.status == OOM), key=_size, default=None)

    def exit_code(self, signum: int | None) -> int:
        """``signum``: of the signal that ended the command early, if any."""
        if signum is not None:
            return 128 + signum
        return 0 if self.best is not None else 1

    def to_text(self) -> str:
        """The whole table; a line may cover several rounds."""
        lines = [line.to_text(with_spread=True) for line in self.lines]
        bad = [
            f"batch size {ln.batch_size:,}: {ln.status_text}" for ln in self.lines if not ln.rounds
        ]
        return "\n".join([header(with_spread=True), *lines, *bad, *self.doubts()])

    def doubts(self) -> list[str]:
        """Which figures are unreliable, and what would help."""
        hasty = [f"{ln.batch_size:,}" for ln in self.lines if ln.rounds and not ln.is_typical]
        if not hasty:
            return []
        doubt = "not full for long enough to tell how fast it is in a long run"
        return [f"batch size {', '.join(hasty)}: {doubt}: give it more --seconds, or more rows"]

    def to_json(self) -> dict[str, Any]:
        return {
            "batch_sizes": [line.to_json() for line in self.lines],
            "best": None if self.best is None else self.best.batch_size,
            "largest": None if self.largest is None else self.largest.batch_size,
        }


def header(*, with_spread: bool) -> str:
    """The first line; the spread is over several rounds."""
    return _joined([column.head for column in _COLUMNS], with_spread=with_spread)


def _size(line: SizeResult) -> int:
    return line.batch_size


def _joined(cells: Sequence[str], *, with_spread: bool) -> str:
    padded = (
        cell.rjust(column.width)
        for cell, column in zip(cells, _COLUMNS, strict=True)
        if with_spread or column is not _SPREAD
    )
    return "  ".join(padded).rstrip()


def _short(status: str) -> str:
    """The status without its reason, which is shown below the table: the column is narrow."""
    return status.partition(":")[0]


def _time(ms: float | None) -> str:
    if ms is None:
        return ""
    return f"{ms:,.0f} ms" if ms < 10_000 else f"{ms / 1000:,.1f} s"


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)
