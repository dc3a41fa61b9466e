"""Merging shards into one run: time, memory, and a check that nothing is missing.

    python benchmarks/merge.py [--rounds 3] [--rows 1000000] [--quick]

The dry-run engine fills four shards, then `batchkit merge` joins them into a new folder in each
round. The ledger's bytes per row are those of these short answers.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from counting import JOB, write_rows
from figures import Figure

SHARDS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--quick", action="store_true", help="one round of 200,000 rows")
    args = parser.parse_args()
    n_rounds, n_rows = (1, 200_000) if args.quick else (args.rounds, args.rows)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.toml").write_text(JOB)
        write_rows(folder / "rows.jsonl", n_rows)
        for number in range(SHARDS):
            run(folder, "run", "job.toml", "--shard", f"{number}/{SHARDS}")
        shards = [f"output/counting.shard-{number}-of-{SHARDS}" for number in range(SHARDS)]
        took = []
        for _ in range(n_rounds):
            shutil.rmtree(folder / "output/merged", ignore_errors=True)
            took.append(run(folder, "merge", *shards, "--into", "output/merged"))
        size = (folder / "output/merged/results.jsonl").stat().st_size
    seconds, peaks = ([one[n] for one in took] for n in range(2))
    middle, peak = statistics.median(seconds), statistics.median(peaks)
    print(
        f"{n_rows:,} records of {SHARDS} shards: {middle:.1f} s ({min(seconds):.1f}–{max(seconds):.1f}),"
        f" {n_rows / middle:,.0f} rows/s, {peak:.0f} MiB, {size / n_rows:.0f} bytes a row"
    )
    figures = [
        Figure(f"merge of {n_rows:,} records", n_rows / middle, "rows/s"),
        Figure("its memory", peak, "MiB"),
    ]
    line = {
        "benchmark": "merge",
        "rows": n_rows,
        "seconds": seconds,
        "peak_mib": peaks,
        "bytes_a_row": round(size / n_rows, 1),
        "figures": [figure.to_json() for figure in figures],
    }
    print(json.dumps(line))


def run(folder: Path, *arguments: str) -> tuple[float, float]:
    """Seconds and peak MiB of a command that must succeed."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "batchkit", *arguments],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{arguments}: exit code {process.returncode}")
    return time.perf_counter() - began, usage.ru_maxrss / 1024


if __name__ == "__main__":
    main()
