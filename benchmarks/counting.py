"""What a row costs if the model costs nothing: rate, memory, resume and checkpoint.

    python benchmarks/counting.py [--rounds 3] [--rows 1000000] [--quick]

The dry-run engine only counts; everything else is as in any run: rows from a file, a template, one
record on disk for each row, fsync and checkpoint every five seconds. Each start is a fresh command.
A resume is timed from the start of its process to the first new record on disk, with ``--rows``
rows done before: with the run's last checkpoint, with one that lacks a tenth of the rows (as after
kill -9), and without one.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from frame import HERE, JOB, Figure, arguments, batchkit, python, report, spread, write_rows

FEW = 10_000
NEW = 1_000  # rows that a resume finds to do
STATES = ["current", "a tenth old", "missing"]
OLDER = """
import sys
from pathlib import Path
from batchkit.storage.ledger import Ledger
Ledger(Path(sys.argv[1])).close()
"""


class Start(NamedTuple):
    """The result of one command: its summary, its peak resident memory, and the seconds until its
    first record was written."""

    summary: dict[str, Any]
    peak_mib: float
    first_record_s: float


def main() -> None:
    args = arguments(__doc__, "one round of 300,000 rows", rounds=(3, 1), rows=(1_000_000, 300_000))
    n_rounds, n_rows = args.rounds, args.rows
    few: list[Start] = []
    many: list[Start] = []
    resumes: dict[str, list[float]] = {state: [] for state in STATES}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.toml").write_text(JOB)
        write_rows(folder / "rows.jsonl", n_rows + NEW)
        for _ in range(n_rounds):
            few.append(start(folder, FEW))
            shutil.rmtree(folder / "output")
            many.append(start(folder, n_rows))
            for state, seconds in resumed(folder).items():
                resumes[state].append(seconds)
            shutil.rmtree(folder / "output")
    found = {"rows": n_rows, **rates(few, many), **resume_times(resumes, n_rows)}
    found |= {"checkpoints": checkpoints(1_000_000 if args.quick else 10_000_000)}
    report("counting", figures(found), rounds=n_rounds, **found)


def rates(few: Sequence[Start], many: Sequence[Start]) -> dict[str, Any]:
    """Return the rows per second while the engine is loaded, and the memory that a hundred times as
    many rows add."""
    print(f"{'rows':>10} {'rows/s':>9} {'spread':>15} {'peak MiB':>9} {'spread':>13}")
    for starts in (few, many):
        speeds, peaks = speeds_of(starts), [one.peak_mib for one in starts]
        print(
            f"{starts[0].summary['ok']:>10,} {statistics.median(speeds):>9,.0f} {spread(speeds, 0):>15}"
            f" {statistics.median(peaks):>9.1f} {spread(peaks, 1):>13}"
        )
    extra = [more.peak_mib - less.peak_mib for less, more in zip(few, many, strict=True)]
    growth = [b / a for a, b in zip(speeds_of(few), speeds_of(many), strict=True)]
    print(
        f"extra memory {statistics.median(extra):.1f} MiB ({spread(extra, 1)}),"
        f" rate against {FEW:,} rows {statistics.median(growth):.2f} × ({spread(growth, 2)})\n"
    )
    return {
        "rows_per_s": statistics.median(speeds_of(many)),
        "rows_per_s_rounds": speeds_of(many),
        "extra_mib": round(statistics.median(extra), 1),
        "extra_mib_rounds": [round(mib, 1) for mib in extra],
        "rate_ratio": round(statistics.median(growth), 3),
    }


def figures(found: dict[str, Any]) -> list[Figure]:
    rows = f"{found['rows']:,} rows"
    return [
        Figure(f"dry-run engine, {rows}", found["rows_per_s"], "rows/s", 20_000),
        Figure(f"extra memory of {rows}", found["extra_mib"], "MiB", 64, at_most=True),
        *(
            Figure(f"resume after {rows}, checkpoint {state}", seconds, "s", 2, at_most=True)
            for state, seconds in found["resume_s"].items()
            if state != "missing"
        ),
    ]


def resume_times(resumes: dict[str, list[float]], n_rows: int) -> dict[str, Any]:
    print(
        f"{'resume after ' + format(n_rows, ',') + ' rows':>28} {'first new row s':>16} {'spread':>13}"
    )
    medians = {state: round(statistics.median(times), 3) for state, times in resumes.items()}
    for state, times in resumes.items():
        print(f"{'checkpoint ' + state:>28} {medians[state]:>16.2f} {spread(times, 2):>13}")
    print()
    return {"resume_s": medians}


def checkpoints(most: int) -> list[dict[str, Any]]:
    """Run ``checkpoint.py``, return its figures, and print how they grow from the fewest rows to
    the most."""
    *table, line = python(HERE, "checkpoint.py", "--max", most).stdout.splitlines()
    print("\n".join(table))
    results: list[dict[str, Any]] = json.loads(line)["results"]
    for order in ("in order", "scattered"):
        first, *_, last = (found for found in results if found["order"] == order)
        print(
            f"checkpoint {order}: {last['completions'] / first['completions']:,.0f} × the rows,"
            f" {last['write_s'] / first['write_s']:,.0f} × the time to write"
        )
    return results


def start(folder: Path, limit: int | None) -> Start:
    """Run or resume the job, watching its log."""
    log = folder / "output" / "counting" / "results.jsonl"
    before = log.stat().st_size if log.exists() else 0
    began, written = time.perf_counter(), list[float]()

    def is_awaited() -> bool:
        if log.exists() and log.stat().st_size > before:
            written.append(time.perf_counter() - began)
        return not written

    options = [] if limit is None else ["--limit", limit]
    ended = batchkit(folder, "run", "job.toml", *options, meanwhile=is_awaited)
    if not written:
        raise SystemExit(f"no new record was seen: {ended.summary}")
    return Start(ended.summary, ended.peak_mib, written[0])


def resumed(folder: Path) -> dict[str, float]:
    """Return the seconds to the first new record, for each state of the checkpoint."""
    run = folder / "output" / "counting"
    log, checkpoint = run / "results.jsonl", run / "checkpoint.json"
    size = log.stat().st_size
    older_checkpoint(run, folder / "older")
    checkpoint.rename(folder / "current.json")
    seconds = {}
    for state in STATES:
        os.truncate(log, size)
        if state == "missing":
            checkpoint.unlink()
        else:
            kept = "current.json" if state == "current" else "older/checkpoint.json"
            shutil.copy(folder / kept, checkpoint)
        found = start(folder, None)
        if found.summary["total"] - found.summary["skipped"] != NEW:
            raise SystemExit(f"resume, checkpoint {state}: {found.summary}")
        seconds[state] = found.first_record_s
    return seconds


def older_checkpoint(run: Path, folder: Path) -> None:
    """Write into ``folder`` the checkpoint that ``run`` had when nine tenths of its log were
    written."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with (run / "results.jsonl").open("rb") as log, (folder / "results.jsonl").open("wb") as copy:
        left = os.fstat(log.fileno()).st_size * 9 // 10
        while left > 0:
            left -= copy.write(log.read(min(left, 2**20)))
        copy.write(log.readline())
    python(folder, "-c", OLDER, folder)
    (folder / "results.jsonl").unlink()


def speeds_of(starts: Sequence[Start]) -> list[float]:
    return [one.summary["rows_per_s"] for one in starts]


if __name__ == "__main__":
    main()
