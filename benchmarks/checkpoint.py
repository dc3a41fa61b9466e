"""The cost of a checkpoint by the number of completions, in order and scattered: write time, size,
read time.

    python benchmarks/checkpoint.py [--max 10000000] [--quick]

Scattered is the worst case (every second row done, at random); a run's own completions are nearly
in order, and then a checkpoint is a few hundred bytes whatever the number of rows.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from frame import Figure, arguments, report

from batchkit.storage.checkpoint import CHECKPOINT, read_checkpoint
from batchkit.storage.index_set import IndexSet, ranges_of
from batchkit.storage.ledger import Ledger

ROUNDS = 3


def main() -> None:
    most = arguments(__doc__, "--max 1000000", max=(10_000_000, 1_000_000)).max
    random = np.random.default_rng(0)
    results = []
    print(
        f"{'completions':>12} {'order':>10} {'ranges':>10} {'MB':>8} {'write s':>9} {'read s':>9}"
    )
    for rows in (10**n for n in range(4, 9) if 10**n <= most):
        orders: dict[str, np.ndarray] = {
            "in order": np.arange(rows, dtype=np.uint32),
            "scattered": random.permutation(2 * rows)[:rows].astype(np.uint32),
        }
        for order, indexes in orders.items():
            found = measure(IndexSet(indexes))
            results.append({"completions": rows, "order": order, **found})
            print(
                f"{rows:>12,} {order:>10} {found['ranges']:>10,} {found['bytes'] / 1e6:>8.1f}"
                f" {found['write_s']:>9.3f} {found['read_s']:>9.3f}"
            )
    figures = [
        Figure(
            f"{found['completions']:,} completions {found['order']}: write", found["write_s"], "s"
        )
        for found in results[-2:]
    ]
    report("checkpoint", figures, results=results)


def measure(completed: IndexSet) -> dict[str, float]:
    """Return the medians of ``ROUNDS`` rounds, including fsync and rename."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ledger = Ledger(folder)
        ledger.totals.completed = completed

        def write() -> None:
            ledger.checkpoint()

        write_s = median(write)
        read_s = median(lambda: read_checkpoint(folder))
        size = (folder / CHECKPOINT).stat().st_size
        ledger.close()
    return {
        "ranges": len(ranges_of(completed)),
        "bytes": size,
        "write_s": write_s,
        "read_s": read_s,
    }


def median(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return round(statistics.median(seconds), 4)


if __name__ == "__main__":
    main()
