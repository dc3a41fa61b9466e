"""The table of batch sizes, as text that grows line by line and as JSON."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from batchkit.commands.tuning.rounds import Round
from batchkit.config.numbers import number

OK, OOM = "ok", "OOM"
_WIDTHS = {
    "batch size": 10,
    "status": 6,
    "time": 8,
    "rows/s": 9,
    "spread": 7,
    "prompt tok/s": 12,
    "output tok/s": 12,
    "p50": 9,
    "p99": 9,
    "peak memory": 14,
}


class Memory(NamedTuple):
    """In units of 2**30 bytes, as nvidia-smi and ``run.max_host_gb`` count them."""

    gb: float
    of: Literal["gpu", "host"]


class Idle(NamedTuple):
    """Shares, 0 to 1, while the engine was kept full; ``running`` is how many requests ran at once on
    average.

    ``rendering``: of its places that were empty because no rendered row was ready. ``preparing``: that were
    empty although there were rows, because these were still being tokenised or their images preprocessed.
    ``kv_cache``: of the time in which the KV cache was full.
    """

    rendering: float
    preparing: float
    kv_cache: float
    running: float
    preempted: int


@dataclass(frozen=True, slots=True)
class SizeResult:
    """One batch size: a trial, or all its trials. ``status``: ``ok``, ``OOM``, or ``error: …``.

    ``rounds`` is empty unless it is ok. ``trial_s``: whole trials, including ``load_s`` for loading
    the engine. ``failed``: rows by kind of error. ``reason``: why an engine died.
    """

    batch_size: int
    status: str
    trial_s: float
    load_s: float = 0.0
    rounds: tuple[Round, ...] = ()
    answered: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    memory: Memory | None = None
    idle: Idle | None = None
    reason: str = ""

    @classmethod
    def of(cls, trials: Sequence[SizeResult]) -> SizeResult:
        """``trials`` are of one size."""
        bad = next((trial.status for trial in trials if trial.status != OK), OK)
        return cls(
            batch_size=trials[0].batch_size,
            status=bad,
            trial_s=sum(trial.trial_s for trial in trials),
            load_s=statistics.median(trial.load_s for trial in trials),
            rounds=tuple(r for trial in trials for r in trial.rounds) if bad == OK else (),
            answered=sum(trial.answered for trial in trials),
            failed=sum((trial.failed for trial in trials), Counter()),
            memory=max(
                (trial.memory for trial in trials if trial.memory is not None), default=None
            ),
            idle=trials[-1].idle,
            reason=next((trial.reason for trial in trials if trial.reason), ""),
        )

    @property
    def seconds(self) -> float:
        """Of the rounds, or of the trials that had none."""
        return sum(found.seconds for found in self.rounds) or self.trial_s

    @property
    def is_typical(self) -> bool:
        """The engine was as busy as in the whole job."""
        return bool(self.rounds) and all(found.is_typical for found in self.rounds)

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
                name: round(getattr(idle, name), 4)
                for name in ("rendering", "preparing", "kv_cache")
            },
            "rounds": [
                {"seconds": round(found.seconds, 3), "rows": found.rows}
                | {name: _rounded(getattr(found, name)) for name in _RATES}
                for found in self.rounds
            ],
        }

    def to_text(self) -> str:
        # The status without its reason, which is shown below the table: the column is narrow.
        status = self.status.partition(":")[0]
        cells = [f"{self.batch_size:,}", status, f"{self.seconds:.1f} s"]
        if self.rounds:
            spread = "" if self.spread is None else f"±{self.spread:.0%}"
            cells += [number(self.rows_per_s), spread]
            cells += [number(self.median(n)) for n in ("prompt_tokens_per_s", _OUTPUT)]
            cells += [_time(self.median(name)) for name in ("p50_ms", "p99_ms")]
        else:
            cells += [""] * 6
        cells.append("" if self.memory is None else f"{self.memory.gb:.2f} GiB {self.memory.of}")
        return _joined(cells)


_OUTPUT = "completion_tokens_per_s"
_RATES = ("rows_per_s", "prompt_tokens_per_s", _OUTPUT, "p50_ms", "p99_ms")


@dataclass(frozen=True, slots=True)
class SizeTable:
    """One line per batch size, the smallest first; ``signum``: of the signal that ended the trials early, if
    any."""

    lines: tuple[SizeResult, ...]
    name: str = ""
    model: str = ""
    option: str = ""
    signum: int | None = None

    @classmethod
    def of(cls, trials: Iterable[SizeResult], **about: Any) -> SizeTable:
        by_size: dict[int, list[SizeResult]] = {}
        for trial in trials:
            by_size.setdefault(trial.batch_size, []).append(trial)
        return cls(tuple(SizeResult.of(by_size[size]) for size in sorted(by_size)), **about)

    @property
    def best(self) -> SizeResult | None:
        """The size that answered most rows a second."""
        ok = [line for line in self.lines if line.rounds]
        return max(ok, key=lambda line: line.rows_per_s or 0.0, default=None)

    @property
    def largest(self) -> SizeResult | None:
        """The largest size that fitted."""
        return next((line for line in reversed(self.lines) if line.rounds), None)

    @property
    def smallest_too_large(self) -> SizeResult | None:
        """The smallest size that ran out of memory."""
        return next((line for line in self.lines if line.status == OOM), None)

    @property
    def exit_code(self) -> int:
        if self.signum is not None:
            return 128 + self.signum
        return 0 if self.best is not None else 1

    def to_text(self) -> str:
        bad = [
            f"batch size {ln.batch_size:,}: {ln.status_text}" for ln in self.lines if not ln.rounds
        ]
        return "\n".join([HEADER, *(line.to_text() for line in self.lines), *bad, *self.doubts()])

    def doubts(self) -> list[str]:
        """Which figures are unreliable, and what would help."""
        hasty = [f"{ln.batch_size:,}" for ln in self.lines if ln.rounds and not ln.is_typical]
        if not hasty:
            return []
        doubt = "not full for long enough to show how fast it is in a long run"
        return [f"batch size {', '.join(hasty)}: {doubt}: give it more --seconds, or more rows"]

    def to_json(self) -> dict[str, Any]:
        return {
            "batch_sizes": [line.to_json() for line in self.lines],
            "best": None if self.best is None else self.best.batch_size,
            "largest": None if self.largest is None else self.largest.batch_size,
            "name": self.name,
            "model": self.model,
            "option": self.option,
            "interrupted": self.signum is not None,
        }


def _joined(cells: Iterable[str]) -> str:
    padded = (cell.rjust(width) for cell, width in zip(cells, _WIDTHS.values(), strict=True))
    return "  ".join(padded).rstrip()


HEADER = _joined(_WIDTHS)


def _time(ms: float | None) -> str:
    if ms is None:
        return ""
    return f"{ms:,.0f} ms" if ms < 10_000 else f"{ms / 1000:,.1f} s"


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)
