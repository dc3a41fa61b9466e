"""``batchkit view`` over a run of 1,000,000 rows: seconds until a page of rows is there, and memory.

    python benchmarks/view.py [--rows 1000000] [--quick]

The server is a fresh process. Times are those of whole HTTP requests, until the answer is over the whole log: a page
asks again while it is not. Memory is the largest resident set of the process.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

import tomlkit
from frame import Figure, arguments, report
from parquet import make_run, records

GROUP = "drinks"


def wanted_of(n: int) -> dict[str, tuple[dict[str, Any], float | None]]:
    """Return queries over ``n`` rows by name, and the maximum seconds of each."""
    failed, row = n * 7 // 1000 * 100 + 99, n * 6 // 10
    return {
        "a page in the middle": ({"offset": n // 2}, 1),
        "filter by kind of failure": ({"kind": "timeout"}, 2),
        "filter by group": ({"group": GROUP}, 2),
        "filter by score": ({"scorer": "f1", "min": 0.25, "max": 0.5}, 2),
        "sort by latency": ({"sort": "latency", "order": "desc"}, 2),
        "sort by score, filtered": ({"sort": "score", "scorer": "f1", "status": "ok"}, 2),
        "search, one row has it": ({"text": f"row {failed}"}, 2),
        "search, an id": ({"text": f"q{row}"}, 2),
        "search, no row has it": ({"text": "Nowhere to be found"}, 2),
        "search, half of the rows": ({"text": "so"}, None),
    }


class Answer(NamedTuple):
    """The times of a query. ``first_s``: seconds until the first answer; ``whole_s``: until an
    answer over the whole log."""

    first_s: float
    whole_s: float
    total: int


class Server(NamedTuple):
    process: subprocess.Popen[str]
    connection: HTTPConnection

    def get(self, path: str, **params: Any) -> Any:
        self.connection.request("GET", f"/api/runs/view{path}?{urlencode(params)}")
        answer = self.connection.getresponse()
        content = answer.read()
        assert answer.status == 200, content
        return json.loads(content)

    def rows(self, **params: Any) -> Answer:
        began, first = time.perf_counter(), None
        while True:
            page = self.get("/rows", **params)
            first = first or time.perf_counter() - began
            if page["indexed"] == 1:
                return Answer(first, time.perf_counter() - began, page["total"])

    def peak_mib(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def main() -> None:
    n = arguments(__doc__, "200,000 rows", rows=(1_000_000, 200_000)).rows
    with tempfile.TemporaryDirectory() as name:
        log = write_run(Path(name), n)
        print(f"{n:,} rows, {log.stat().st_size / 1e6:,.0f} MB of JSON lines")
        with serving(log.parent) as server:
            cold = server.rows()
            figures = [
                Figure("first page", cold.first_s, "s", 1, True),
                Figure("until the log is indexed", cold.whole_s, "s"),
                seconds("first page of the status", lambda: server.get(""), 1),
                *queries(server, n),
                Figure("largest resident set", server.peak_mib(), "MiB", 300, True),
            ]
        write_scores(log)
        with serving(log.parent) as server:
            figures += [
                Figure("until new scores of all rows are known", server.rows().whole_s, "s"),
                seconds("filter by new score", lambda: server.rows(scorer="em", min=1), 2),
                Figure("largest resident set, new scores", server.peak_mib(), "MiB", 300, True),
            ]
        assert cold.total == n
    for figure in figures:
        wanted = "" if figure.wanted is None else f"≤ {figure.wanted:g}"
        print(
            f"{figure.what:<52} {figure.found:>8.2f} {figure.unit:<4} {wanted:>6}  {figure.outcome}"
        )
    report("view", figures, rows=n)


def queries(server: Server, n: int) -> Iterator[Figure]:
    for what, (params, wanted) in wanted_of(n).items():
        answer = server.rows(limit=50, **params)
        figure = f"{what} ({answer.total:,} rows)"
        yield Figure(figure, answer.whole_s, "s", wanted, True)
        if wanted is None:
            yield Figure(f"{what}: its first page", answer.first_s, "s", 2, True)


def seconds(what: str, act: Any, wanted: float) -> Figure:
    began = time.perf_counter()
    act()
    return Figure(what, time.perf_counter() - began, "s", wanted, True)


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    command = ["view", str(folder), "--port", "0", "--no-browser"]
    process = subprocess.Popen(
        [sys.executable, "-m", "batchkit", *command], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        address = urlsplit(process.stdout.readline().strip())
        assert address.hostname
        yield Server(process, HTTPConnection(address.hostname, address.port))
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


def write_run(folder: Path, n: int) -> Path:
    """Write a finished run of ``n`` rows, with scores, groups and failures. Its log has the form
    that a run writes."""
    from batchkit.storage.ledger import Ledger, RecordLine, rewritten

    first = make_run(folder, 1)
    run = first.parent.rename(folder / "output" / "view")
    job = tomlkit.parse((run / "job.toml").read_text())
    scoring = {"reference": "topic", "scorers": ["f1", "em"], "group_by": "topic"}
    job |= {"name": "view", "scoring": scoring}
    (run / "job.toml").write_text(tomlkit.dumps(job))
    record = json.loads((run / "results.jsonl").read_bytes())
    (run / "results.jsonl").unlink()

    def lines() -> Iterator[RecordLine]:
        for made in records(record, n):
            index = made["index"]
            if index % 9 == 0:
                made["fields"] = {"topic": GROUP}
            if made["status"] == "ok":
                made |= {
                    "prediction": made["text"][:20],
                    "scores": {"f1": index % 97 / 96, "em": 0},
                }
            yield rewritten(made)

    ledger = Ledger(run)
    ledger.write(lines())
    ledger.close()
    manifest = json.loads((run / "manifest.json").read_bytes())
    (run / "manifest.json").write_text(json.dumps({**manifest, "name": "view", "total": n}))
    return run / "results.jsonl"


def write_scores(log: Path) -> None:
    """Write the scores as ``batchkit score`` does, with all rows right."""
    from batchkit.storage.newest_lines import read_newest
    from batchkit.storage.score_store import ScoreLine, write_scores

    lines = (
        ScoreLine(
            record["index"], record["input_hash"], record["finished_at"], "x", {"f1": 1, "em": 1}
        )
        for record in read_newest(log)
    )
    write_scores(log.parent, lines, before=lambda: None)


if __name__ == "__main__":
    main()
