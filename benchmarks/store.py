"""What ``output.store`` costs, and how long another machine takes to continue.

    python benchmarks/store.py [--rounds 3] [--rows 1000000] [--quick]

The dry-run engine, which only counts, so that the run writes as many rows a second as batchkit can.
- Rate: with a store (a folder, ``file://``) and without it, interleaved. The rate is that of the loaded engine.
- Traffic: the same run against a real S3 server (moto) behind a proxy that counts requests and bytes. The price
  is that of S3 Standard in us-east-1 (https://aws.amazon.com/s3/pricing/): 0.005 US$ for 1,000 PUTs, 0.0004 US$ for
  1,000 GETs.
- Restore: a start on a machine without files, from the start of its process to the first new record on disk.
  Another run has answered all rows but 1,000.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from frame import HERE, JOB, Figure, arguments, batchkit, report, spread, write_rows

sys.path.insert(0, str(HERE.parent))

LEFT = 1000
PUT_USD, GET_USD = 0.005 / 1000, 0.0004 / 1000


def main() -> None:
    args = arguments(__doc__, "one round, few rows", rounds=(3, 1), rows=(1_000_000, 50_000))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "rows.jsonl", args.rows)
        (folder / "job.toml").write_text(JOB)
        figures = [*rate(folder, args.rounds), *restore(folder, args.rows)]
        figures += traffic(folder, args.rows)
    report("store", figures, rounds=args.rounds)


def rate(folder: Path, rounds: int) -> Iterator[Figure]:
    """Compare runs with a store and without."""
    ratios, whole = [], []
    for number in range(rounds):
        ended = {}
        for side, more in (("with", [f"output.store=file://{folder}/store"]), ("without", [])):
            name = f"{side}-{number}"
            sets = [word for one in (f"name={name}", *more) for word in ("--set", one)]
            ended[side] = batchkit(folder, "run", "job.toml", *sets)
            shutil.rmtree(folder / "output")
        rates = {side: its.summary["rows_per_s"] for side, its in ended.items()}
        ratios.append(rates["with"] / rates["without"])
        whole.append(ended["without"].seconds / ended["with"].seconds)
        memory = {side: round(its.peak_mib) for side, its in ended.items()}
        print(f"round {number + 1}: rows/s {rates}, MiB {memory}", flush=True)
    ratio = statistics.median(ratios)
    print(
        f"rate with a store {ratio:.3f} × ({spread(ratios, 3)}), whole command {statistics.median(whole):.3f} ×\n"
    )
    yield Figure("rate with a store", ratio, wanted=0.98)
    yield Figure("whole command with a store", statistics.median(whole))


def restore(folder: Path, n_rows: int) -> Iterator[Figure]:
    sets = ["--set", "name=restored", "--set", f"output.store=file://{folder}/store"]
    batchkit(folder, "run", "job.toml", *sets, "--limit", n_rows - LEFT)
    log = folder / "output" / "restored" / "results.jsonl"
    watch = FirstNew(log, log.stat().st_size)
    shutil.rmtree(folder / "output")
    ended = batchkit(folder, "run", "job.toml", *sets, meanwhile=watch.is_awaited, every_s=0.02)
    assert ended.summary["skipped"] == n_rows - LEFT
    print(
        f"restore of {n_rows - LEFT:,} rows: first new record after {watch.seconds:.1f} s, {ended.peak_mib:.0f} MiB\n"
    )
    yield Figure("first new row on another machine", watch.seconds, "s")
    yield Figure("memory of a restore", ended.peak_mib, "MiB")


def traffic(folder: Path, n_rows: int) -> Iterator[Figure]:
    from tests.support.object_servers import moto_server
    from tests.support.store_proxy import store_proxy

    with moto_server(folder) as server, store_proxy(server.url) as proxy:
        environment = {**os.environ, **server.environment(proxy.url)}
        sets = ["--set", "name=sent", "--set", f"output.store={server.store}/runs"]
        ended = batchkit(folder, "run", "job.toml", *sets, environment=environment)
        requests, n_in, _ = proxy.traffic()
    log = folder / "output" / "sent" / "results.jsonl"
    seconds = ended.summary["seconds"]
    usd = requests["PUT"] * PUT_USD + requests["GET"] * GET_USD
    print(
        f"{n_rows:,} rows in {seconds:.0f} s: {dict(requests)}, {n_in / n_rows:.0f} bytes a row sent,"
    )
    print(
        f"  {log.stat().st_size / n_rows:.0f} bytes a row in the log; {usd:.4f} US$, {usd / seconds * 3600:.4f} US$ an hour"
    )
    yield Figure("requests to the store", sum(requests.values()) / seconds * 3600, "an hour")
    yield Figure("bytes sent", n_in / n_rows, "bytes/row")
    yield Figure("price of the requests", usd / seconds * 3600, "US$/hour")


class FirstNew:
    """A watcher of a log. ``seconds``: when it had more than the ``known`` bytes."""

    def __init__(self, log: Path, known: int) -> None:
        self._log, self._known, self._began = log, known, time.perf_counter()
        self.seconds = 0.0

    def is_awaited(self) -> bool:
        if self._log.exists() and self._log.stat().st_size > self._known:
            self.seconds = time.perf_counter() - self._began
        return not self.seconds


if __name__ == "__main__":
    main()
