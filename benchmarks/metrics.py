"""The cost of Prometheus metrics for a run.

    python benchmarks/metrics.py [--rounds 7] [--rows 300000] [--quick]

The same command with and without ``run.metrics_port``, in turns. The model costs nothing (the dry-run
engine), so the share is the largest that a user can see. A scrape comes each second; Prometheus' own
default is each minute. CPU time is the run's own, all threads; the scraper's is not counted.
"""

from __future__ import annotations

import http.client
import shutil
import socket
import statistics
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from frame import JOB, Figure, arguments, batchkit, report, spread, write_rows

INTERVAL_S = 1.0


class Run(NamedTuple):
    rows_per_s: float
    cpu_s: float
    scrapes: int


def main() -> None:
    args = arguments(
        __doc__, "three rounds of 100,000 rows", rounds=(7, 3), rows=(300_000, 100_000)
    )
    without: list[Run] = []
    scraped: list[Run] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.toml").write_text(JOB)
        write_rows(folder / "rows.jsonl", args.rows)
        for number in range(args.rounds):  # neither is always the first
            for has_port in (False, True) if number % 2 else (True, False):
                (scraped if has_port else without).append(run(folder, has_port=has_port))
    rates = [b.rows_per_s / a.rows_per_s for a, b in zip(without, scraped, strict=True)]
    costs = [b.cpu_s / a.cpu_s for a, b in zip(without, scraped, strict=True)]
    for title, runs in (("without", without), ("scraped", scraped)):
        speeds, seconds = [one.rows_per_s for one in runs], [one.cpu_s for one in runs]
        print(
            f"{title}: {statistics.median(speeds):,.0f} rows/s ({spread(speeds, 0)}), CPU"
            f" {statistics.median(seconds):.2f} s ({spread(seconds, 2)}), scrapes {runs[0].scrapes}"
        )
    share = 100 * (statistics.median(costs) - 1)
    print(f"rate with by without {statistics.median(rates):.3f} ({spread(rates, 3)})")
    print(f"CPU time with by without {statistics.median(costs):.3f} ({spread(costs, 3)})")
    figure = Figure(
        "CPU time that a scrape each second adds", round(share, 2), "%", 1, at_most=True
    )
    report("metrics", [figure], rounds=args.rounds, rates=rates, cpu=costs)


def run(folder: Path, *, has_port: bool) -> Run:
    shutil.rmtree(folder / "output", ignore_errors=True)
    port, scrapes = free_port() if has_port else None, list[bool]()
    options = [] if port is None else ["--set", f"run.metrics_port={port}"]

    def scrape() -> bool:
        scrapes.append(port is not None and is_scraped(port))
        return True

    run = ("run", "job.toml", *options)
    ended = batchkit(folder, *run, meanwhile=scrape, every_s=INTERVAL_S)
    if any(scrapes) != has_port:
        raise SystemExit(f"{run}: {sum(scrapes)} scrapes")
    return Run(ended.summary["rows_per_s"], ended.cpu_s, sum(scrapes))


def is_scraped(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with suppress(OSError):  # it has not begun to listen, or has ended
        connection.request("GET", "/metrics")
        return b"batchkit_rows{" in connection.getresponse().read()
    return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
