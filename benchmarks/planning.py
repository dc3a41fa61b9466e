"""What ``run.order = "global"`` costs before the first row: time, memory and disk.

    python benchmarks/planning.py [--rows 1000000] [--large 10000000] [--quick]

The dry-run engine, rows of about 200 characters in a file, ten to each beginning, and no two of these near
each other. The clock runs from the start of the process to the first record on disk, with the order of the
input and with the global one; the difference is the planning. A run with a model plans while it loads
the model. Memory is the peak of the process until then, disk what it has written to the temporary folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from frame import JOB, Figure, arguments, report

SHARED = 10  # rows with the same beginning
STRIDE = 7919  # a prime, so that rows with the same beginning lie far from each other
BEGINNING = "Here is document {:08}. " + "The quick brown fox jumps over the lazy dog. " * 3
BYTES_WANTED = 100  # for each row
TIME_LIMIT_S = 1800


class Planned(NamedTuple):
    seconds: float
    peak_mib: float
    disk_mib: float


def main() -> None:
    numbers = {"rows": (1_000_000, 50_000), "large": (10_000_000, 200_000)}
    args = arguments(__doc__, "fewer rows", **numbers)
    figures: list[Figure] = []
    for n_rows in (args.rows, args.large):
        with tempfile.TemporaryDirectory() as name:
            figures += measured(Path(name), n_rows)
    report("planning", figures)


def measured(folder: Path, n_rows: int) -> Iterator[Figure]:
    write(folder / "rows.jsonl", n_rows)
    (folder / "job.toml").write_text(JOB)
    plain, ordered = (first_record(folder, order) for order in ("input", "global"))
    seconds = ordered.seconds - plain.seconds
    per_row = (ordered.peak_mib - plain.peak_mib) * 2**20 / n_rows
    size = (folder / "rows.jsonl").stat().st_size / 2**20
    print(f"{n_rows:,} rows, {size:,.0f} MiB:")
    for what, its in (("input", plain), ("global", ordered)):
        print(
            f"{what:>8}: first record after {its.seconds:7.1f} s, {its.peak_mib:7,.0f} MiB of memory,"
            f" {its.disk_mib:7,.0f} MiB in the temporary folder"
        )
    print(
        f"planning: {seconds:.1f} s, {seconds / n_rows * 1e6:.1f} µs and {per_row:.0f} bytes a row\n"
    )
    yield Figure(f"planning, {n_rows:,} rows", seconds, "s")
    yield Figure(
        f"memory of planning, {n_rows:,} rows", per_row, "bytes/row", BYTES_WANTED, at_most=True
    )
    yield Figure(f"disk of planning, {n_rows:,} rows", ordered.disk_mib, "MiB")


def write(path: Path, n_rows: int) -> None:
    n_documents = n_rows // SHARED
    with path.open("w") as file:
        for index in range(n_rows):
            text = BEGINNING.format(index * STRIDE % n_documents)
            file.write(json.dumps({"id": index, "question": f"{text}Question {index}?"}) + "\n")


def first_record(folder: Path, order: str) -> Planned:
    """Run until the first record is on disk, and stop the run."""
    scratch = folder / f"tmp-{order}"
    scratch.mkdir()
    sets = [f"name={order}", f"run.order={order}", "prompt.user={{ question }}"]
    words = [word for one in sets for word in ("--set", one)]
    log, began = folder / "output" / order / "results.jsonl", time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "batchkit", "run", "job.toml", *words],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    peak = disk = 0.0
    while not (log.exists() and log.stat().st_size):
        if process.poll() is not None or time.perf_counter() - began > TIME_LIMIT_S:
            process.kill()
            raise SystemExit(f"order {order}: no record; {process.communicate()[1][-2000:]!r}")
        peak = max(peak, peak_mib(process.pid))
        disk = max(disk, size_mib(scratch))
        time.sleep(0.05)
    seconds = time.perf_counter() - began
    peak, disk = max(peak, peak_mib(process.pid)), max(disk, size_mib(scratch))
    process.terminate()
    process.communicate()
    return Planned(seconds, peak, disk)


def peak_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def size_mib(folder: Path) -> float:
    sizes = (path.stat().st_size for path in folder.rglob("*.rows") if path.exists())
    return sum(sizes) / 2**20


if __name__ == "__main__":
    main()
