"""Several workers on Ray: what a slow one costs, and how many rows the driver can handle.

    python benchmarks/workers.py [--rounds 3] [--quick]

**Uneven workers.** Two of them with a simulated accelerator, one ten times slower than the other.
Compared: `run --workers 2`, from the first worker that is up to the last record, and static halves,
`--shard 0/2` and `1/2` at once, each from its own loaded model; the later end counts. The ideal
split is the time that both would need together at the rates that each had alone, in those halves.

**Even workers.** The same with two that are equally fast: what leases and Ray cost where they gain nothing.

**The driver.** The dry-run engine only counts, so that only leases, records and the ledger are
measured: rows per second over no, one, two and four workers (they and the driver share two cores),
and the driver's own CPU time per row, which limits how many rows per second one driver can handle.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from frame import HERE, Figure, arguments, report, spread, write_rows
from sides import COSTS, FIRST

from batchkit.commands.demo_model import build_demo_model

MIB = 2**20
JOB = """
name = "workers"
[input]
path = "rows.jsonl"
[prompt]
user = "{{ question }}"
[run]
checkpoint_interval_s = 1.0
"""
VLLM = """
[engine]
model = "MODEL"
[engine.options]
dtype = "float32"
enforce_eager = true
max_model_len = 512
max_num_seqs = 16
kv_cache_memory_bytes = 268435456
worker_cls = "uneven.UnevenWorker"
[sampling]
max_tokens = 16
min_tokens = 16
"""
COUNTING = """
[engine]
kind = "dry-run"
"""


class Uneven(NamedTuple):
    """Seconds of one round."""

    leased: float
    halves: float
    ideal: float


class Counted(NamedTuple):
    """One run of the counting engine; ``cpu_s`` and ``peak_mib`` are the driver's own."""

    rows: int
    rows_per_s: float
    cpu_s: float
    peak_mib: float


class Beside(NamedTuple):
    """A run of many rows and one of a twentieth: what each additional row costs the driver."""

    few: Counted
    many: Counted

    @property
    def cpu_us(self) -> float:
        return (self.many.cpu_s - self.few.cpu_s) / (self.many.rows - self.few.rows) * 1e6

    @property
    def extra_mib(self) -> float:
        return self.many.peak_mib - self.few.peak_mib


def main() -> None:
    args = arguments(
        __doc__,
        "one round of fewer rows",
        rounds=(3, 1),
        rows=(1200, 600),
        counted=(200_000, 50_000),
    )
    n_rounds, n_uneven, n_counted = args.rounds, args.rows, args.counted
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_demo_model(folder / "model", text_only=True)
        uneven = [uneven_round(folder, n_uneven) for _ in range(n_rounds)]
        even = [uneven_round(folder, n_uneven, is_even=True) for _ in range(n_rounds)]
        measured = report_uneven(uneven, n_uneven) + report_even(even, n_uneven)
        counted: dict[int, list[Beside]] = {n: [] for n in (0, 1, 2, 4)}
        for _ in range(n_rounds):
            for n_workers, runs in counted.items():
                few, many = (counted_run(folder, n_counted // n, n_workers) for n in (20, 1))
                runs.append(Beside(few, many))
    measured += report_counted(counted, n_counted)
    report(
        "workers",
        measured,
        rounds=n_rounds,
        uneven=[one._asdict() for one in uneven],
        counted={n: [one._asdict() for one in runs] for n, runs in counted.items()},
    )


def uneven_round(folder: Path, n_rows: int, *, is_even: bool = False) -> Uneven:
    write(folder, JOB + VLLM.replace("MODEL", str(folder / "model")), n_rows)
    slow = folder / "slow"
    if is_even:
        slow.touch()
    leased = summary_of(start(folder, "--workers", "2"))["seconds"]
    if not is_even:
        slow.unlink()
    shards = [start(folder, "--shard", f"{number}/2") for number in range(2)]
    halves = [summary_of(shard) for shard in shards]
    slow.unlink()
    shutil.rmtree(folder / "output")
    rate = sum(half["ok"] / half["seconds"] for half in halves)
    return Uneven(leased, max(half["seconds"] for half in halves), n_rows / rate)


def report_uneven(rounds: Sequence[Uneven], n_rows: int) -> list[Figure]:
    against_ideal = [one.leased / one.ideal for one in rounds]
    against_halves = [one.halves / one.leased for one in rounds]
    print(f"{n_rows} rows over two workers, one ten times slower, seconds:")
    print(f"{'':>16} {'median':>8} {'spread':>15}")
    for side in Uneven._fields:
        seconds = [getattr(one, side) for one in rounds]
        print(f"{side:>16} {statistics.median(seconds):>8.1f} {spread(seconds):>15}")
    print(
        f"leased against ideal {statistics.median(against_ideal):.2f} ({spread(against_ideal)}),"
        f" static halves against leased {statistics.median(against_halves):.2f}"
        f" ({spread(against_halves)})\n"
    )
    return [
        Figure(
            "a worker ten times slower, time against the ideal split",
            statistics.median(against_ideal),
            wanted=1.15,
            at_most=True,
        ),
        Figure("the same, faster than static halves", statistics.median(against_halves)),
    ]


def report_even(rounds: Sequence[Uneven], n_rows: int) -> list[Figure]:
    ratios = [one.halves / one.leased for one in rounds]
    print(
        f"{n_rows} rows over two equal workers: {statistics.median(ratios):.2f} ({spread(ratios)}) x two static halves\n"
    )
    return [Figure("two equal workers against two processes", statistics.median(ratios), "×", 0.98)]


def counted_run(folder: Path, n_rows: int, n_workers: int) -> Counted:
    write(folder, JOB + COUNTING, n_rows)
    process = start(folder, *(["--workers", str(n_workers)] if n_workers else []))
    driver, cpu_s, peak = psutil.Process(process.pid), 0.0, 0
    while process.poll() is None:
        try:
            times = driver.cpu_times()
            cpu_s, peak = times.user + times.system, max(peak, driver.memory_info().rss)
        except psutil.NoSuchProcess:
            break
        time.sleep(0.02)
    summary = summary_of(process)
    if summary["ok"] != n_rows:
        raise SystemExit(f"{n_workers} workers: {summary}")
    shutil.rmtree(folder / "output")
    return Counted(n_rows, summary["rows_per_s"], cpu_s, peak / MIB)


def report_counted(runs: dict[int, list[Beside]], n_rows: int) -> list[Figure]:
    print(f"{n_rows:,} rows that cost nothing:")
    print(f"{'workers':>8} {'rows/s':>8} {'spread':>15} {'driver µs/row':>14} {'extra MiB':>10}")
    for n_workers, rounds in runs.items():
        rates = [one.many.rows_per_s for one in rounds]
        print(
            f"{n_workers or 'no Ray':>8} {statistics.median(rates):>8,.0f} {spread(rates, 0):>15}"
            f" {statistics.median(one.cpu_us for one in rounds):>14.1f}"
            f" {statistics.median(one.extra_mib for one in rounds):>10.1f}"
        )
    print("extra MiB: against a twentieth of the rows\n")
    four = runs[4]
    return [
        Figure(
            "rows that cost nothing, 4 workers",
            statistics.median(one.many.rows_per_s for one in four),
            "rows/s",
        ),
        Figure("the driver's time", statistics.median(one.cpu_us for one in four), "µs a row"),
        Figure(
            "extra memory of 20 × the rows",
            statistics.median(one.extra_mib for one in four),
            "MiB",
            64,
            at_most=True,
        ),
    ]


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    costs = {"step_ms": 15, "token_us": 0, "image_ms": 0, "median_tokens": 16}
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)]),
        "OMP_NUM_THREADS": "1",
        COSTS: json.dumps(costs),
        FIRST: str(folder / "slow"),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "batchkit", "run", "job.toml", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )


def summary_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    stdout, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{process.args}: exit code {process.returncode}")
    summary: dict[str, Any] = json.loads(stdout)
    return summary


def write(folder: Path, job: str, n_rows: int) -> None:
    (folder / "job.toml").write_text(job)
    write_rows(folder / "rows.jsonl", n_rows)


if __name__ == "__main__":
    main()
