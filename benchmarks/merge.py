"""Merging shards into one run: time, memory, and a check that nothing is missing.

    python benchmarks/merge.py [--rounds 3] [--rows 1000000] [--quick]

The dry-run engine fills four shards, then `batchkit merge` joins them into a new folder in each
round. The ledger's bytes per row are those of these short answers.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from pathlib import Path

from frame import JOB, Figure, arguments, batchkit, report, write_rows

SHARDS = 4


def main() -> None:
    args = arguments(__doc__, "one round of 200,000 rows", rounds=(3, 1), rows=(1_000_000, 200_000))
    n_rows = args.rows
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.toml").write_text(JOB)
        write_rows(folder / "rows.jsonl", n_rows)
        for number in range(SHARDS):
            batchkit(folder, "run", "job.toml", "--shard", f"{number}/{SHARDS}")
        shards = [f"output/counting.shard-{number}-of-{SHARDS}" for number in range(SHARDS)]
        took = []
        for _ in range(args.rounds):
            shutil.rmtree(folder / "output/merged", ignore_errors=True)
            took.append(batchkit(folder, "merge", *shards, "--into", "output/merged"))
        size = (folder / "output/merged/results.jsonl").stat().st_size
    seconds, peaks = [one.seconds for one in took], [one.peak_mib for one in took]
    middle, peak = statistics.median(seconds), statistics.median(peaks)
    print(
        f"{n_rows:,} records of {SHARDS} shards: {middle:.1f} s ({min(seconds):.1f}–{max(seconds):.1f}),"
        f" {n_rows / middle:,.0f} rows/s, {peak:.0f} MiB, {size / n_rows:.0f} bytes a row"
    )
    figures = [
        Figure(f"merge of {n_rows:,} records", n_rows / middle, "rows/s"),
        Figure("its memory", peak, "MiB"),
    ]
    bytes_a_row = round(size / n_rows, 1)
    report("merge", figures, rows=n_rows, seconds=seconds, peak_mib=peaks, bytes_a_row=bytes_a_row)


if __name__ == "__main__":
    main()
