"""The cost of the ledger at the highest possible rate: fsync, checkpoint and writing, each switched
on and off.

    python benchmarks/ledger.py [--rounds 3] [--rows 200000] [--interval-s 5] [--quick]

The dry-run engine answers at once, so no model hides the cost: with a real one the shares are
smaller in proportion to its speed. Each start is a fresh command, interleaved; rates are rows/s
with the engine up, relative to an unchanged run in the same round. A last kind of start leaves the
ledger unchanged and times its parts, and the check of the log that every command makes before it
reads it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from frame import JOB, Figure, arguments, python, report, write_rows

AS_IT_IS, TIMED = "as it is", "timed"
OFF = {
    "no fsync": "os.fsync does nothing",
    "no checkpoint": "neither fsync nor checkpoint",
    "no writing": "records are made and counted, nothing is written",
    "no ledger": "records are dropped",
}
PARTS = {
    "encode": "record to JSON",
    "flush": "write and count",
    "fsync": "fsync of the log",
    "checkpoint": "checkpoint, its fsyncs included",
}


def main() -> None:
    args = arguments(
        __doc__,
        "one round of 40,000 rows, every 0.5 s",
        {"child": {"help": argparse.SUPPRESS}},
        rounds=(3, 1),
        rows=(200_000, 40_000),
        interval_s=(5.0, 0.5),
    )
    if args.child is not None:
        child(args.child, args.interval_s)
        return
    n_rounds, n_rows, interval_s = args.rounds, args.rows, args.interval_s
    found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in (AS_IT_IS, *OFF, TIMED)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.toml").write_text(JOB)
        write_rows(folder / "rows.jsonl", n_rows)
        for _ in range(n_rounds):
            for mode, results in found.items():
                results.append(start(folder, mode, interval_s))
                shutil.rmtree(folder / "output")
    shares = {**off_shares(found), **part_shares(found[TIMED]), **check_cost(found[TIMED])}
    settings = {"rows": n_rows, "rounds": n_rounds, "interval_s": interval_s}
    report("ledger", figures(n_rows, shares), **settings, **shares)


def off_shares(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Print and return how much faster a run is without each part of the ledger, and the part's
    share of the time."""
    print(f"{'':>16} {'rows/s':>9} {'ratio':>7} {'spread':>13} {'share':>7}")
    speeds = {mode: [one["rows_per_s"] for one in found[mode]] for mode in (AS_IT_IS, *OFF)}
    ratios = {}
    for mode, rates in speeds.items():
        each = [off / on for off, on in zip(rates, speeds[AS_IT_IS], strict=True)]
        ratios[mode] = statistics.median(each)
        print(
            f"{mode:>16} {statistics.median(rates):>9,.0f} {ratios[mode]:>7.3f}"
            f" {f'{min(each):.3f}-{max(each):.3f}':>13} {1 - 1 / ratios[mode]:>7.1%}"
            f"  {OFF.get(mode, '')}"
        )
    print()
    return {
        "rows_per_s": statistics.median(speeds[AS_IT_IS]),
        "ratios": {mode: round(ratio, 4) for mode, ratio in ratios.items()},
    }


def part_shares(timed: list[dict[str, Any]]) -> dict[str, Any]:
    """Print and return each part's share of the wall-clock time, and its CPU time. They differ,
    because other threads can render during a write."""
    print(f"{'':>16} {'share':>7} {'spread':>13} {'CPU µs/row':>11}")
    shares = {}
    for part, meaning in PARTS.items():
        each = [one["wall"][part] / one["seconds"] for one in timed]
        cpu_us = statistics.median(one["cpu"][part] / one["ok"] for one in timed) * 1e6
        shares[part] = {"share": round(statistics.median(each), 5), "cpu_us": round(cpu_us, 3)}
        print(
            f"{part:>16} {statistics.median(each):>7.2%} {f'{min(each):.2%}-{max(each):.2%}':>13}"
            f" {cpu_us:>11.2f}  {meaning}"
        )
    return {"parts": shares}


def check_cost(timed: list[dict[str, Any]]) -> dict[str, Any]:
    """Print and return the seconds to compare a finished log with its checkpoint, for a million of
    these records."""
    per_million = statistics.median(one["check_s"] / one["ok"] for one in timed) * 1e6
    rate = statistics.median(one["log_bytes"] / one["check_s"] for one in timed) / 2**30
    print(f"\nchecking the log: {per_million:.2f} s for 1,000,000 records, {rate:.1f} GiB/s")
    return {"check_s_per_million": round(per_million, 3)}


def figures(n_rows: int, shares: dict[str, Any]) -> list[Figure]:
    clocked = sum(shares["parts"][part]["share"] for part in ("fsync", "checkpoint"))
    what = f"fsync and checkpoint, share of {n_rows:,} rows' time"
    check = "checking the log of 1,000,000 rows before it is read"
    return [
        Figure(what, round(100 * clocked, 2), "%"),
        Figure(check, shares["check_s_per_million"], "s"),
    ]


def start(folder: Path, mode: str, interval_s: float) -> dict[str, Any]:
    return python(folder, __file__, "--child", mode, "--interval-s", interval_s).summary


def child(mode: str, interval_s: float) -> None:
    """Run the job in the working directory with the ledger changed as ``mode`` says.

    batchkit has no option for this, because a run without a ledger can't be resumed. Therefore this
    script replaces functions of the ledger.
    """
    from batchkit.config.loading import load_job
    from batchkit.execution import completions
    from batchkit.execution.processor import ProductionBatchProcessor
    from batchkit.storage.checkpoint import check_log
    from batchkit.storage.ledger import RESULTS, Ledger

    clock = Clock()
    ledger: Any = Ledger
    if mode in ("no fsync", "no checkpoint"):
        os.fsync = nothing  # type: ignore[assignment]
    if mode in ("no checkpoint", "no writing", "no ledger"):
        ledger.sync = only_flush
    if mode == "no writing":
        ledger.flush = only_count
    if mode == "no ledger":
        ledger.write = ledger.flush = nothing
    if mode == TIMED:
        os.fsync = clock.around("fsync", os.fsync)
        completions.line_of = clock.around("encode", completions.line_of)  # type: ignore[assignment]
        ledger.flush = clock.around("flush", ledger.flush)
        ledger.checkpoint = clock.around("checkpoint", ledger.checkpoint)
    job = load_job(Path("job.toml"), [f"run.checkpoint_interval_s={interval_s}"])
    outcome = ProductionBatchProcessor(job, quiet=True).start()
    if mode != "no ledger":  # without a ledger no row has a record at the end
        outcome.checked()
    summary = outcome.summary
    started = time.perf_counter()
    check_log(Path(summary.folder))
    checked = {
        "check_s": time.perf_counter() - started,
        "log_bytes": (Path(summary.folder) / RESULTS).stat().st_size,
    }
    print(json.dumps({**summary.to_json(), **checked, "wall": clock.wall, "cpu": clock.cpu}))


def only_flush(ledger: Any) -> float:
    ledger.flush()
    return 0.0


def only_count(ledger: Any) -> None:
    waiting, ledger._waiting = ledger._waiting, []
    for line in waiting:
        ledger.totals.add(line.record)


def nothing(*args: Any) -> None:
    """Do nothing; replaces a method."""


class Clock:
    """A clock that adds up the seconds of each part. The time of a part inside another one counts
    only for the outer part."""

    def __init__(self) -> None:
        self.wall = dict.fromkeys(PARTS, 0.0)
        self.cpu = dict.fromkeys(PARTS, 0.0)
        self._busy = False

    def around(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            if self._busy:
                return work(*args)
            self._busy = True
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return work(*args)
            finally:
                self.wall[part] += time.perf_counter() - wall
                self.cpu[part] += time.thread_time() - cpu
                self._busy = False

        return timed


if __name__ == "__main__":
    main()
