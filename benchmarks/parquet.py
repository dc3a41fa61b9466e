"""Export to Parquet against what people write: pandas' read_json, then to_parquet.

    python benchmarks/parquet.py [--rounds 3] [--records 1000000] [--quick]

The same ledger, each a fresh command, interleaved; seconds and peak memory of the whole process,
start-up included. The records are as a run leaves them: of very different lengths, with accents and
line breaks, nearly in order, one in a hundred failed. After the first round every value of one file
is compared with the other's (seconds to 1e-12: pandas misreads their last digit). pandas with
pyarrow's parser is another row of the table, without a target.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from frame import Figure, arguments, batchkit, python, report, spread

OURS, PANDAS, ARROW = "batchkit export", "pandas", "pandas, pyarrow"
TO_PARQUET = """
import sys
import pandas
pandas.read_json(sys.argv[1], lines=True).to_parquet(sys.argv[2])
"""
TO_PARQUET_ARROW = """
import sys
import pandas
pandas.read_json(sys.argv[1], lines=True, engine="pyarrow").to_parquet(sys.argv[2])
"""
EQUAL = """
import sys
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

ours, theirs = pq.ParquetFile(sys.argv[1]), pq.ParquetFile(sys.argv[2])
names = theirs.schema_arrow.names
order = pc.sort_indices(theirs.read(["index"])["index"])
rows = ours.metadata.num_rows
assert rows == theirs.metadata.num_rows, (rows, theirs.metadata.num_rows)

def inner(column, key):
    found = theirs.read([column])[column].combine_chunks()
    return pc.struct_field(found, key)

pairs = {name: (name, None) for name in ("index", "id", "status", "attempt", "text",
                                         "finish_reason", "latency_s", "finished_at")}
pairs |= {name: ("usage", name) for name in ("prompt_tokens", "completion_tokens")}
pairs |= {f"error_{name}": ("error", name) for name in ("kind", "type", "message")}
pairs |= {"topic": ("fields", "topic")}
for name, (column, key) in pairs.items():
    a = ours.read([name])[name].combine_chunks()
    b = theirs.read([column])[column].combine_chunks() if key is None else inner(column, key)
    b = pc.take(b, order)
    if pa.types.is_timestamp(b.type):
        b = pc.strftime(b.cast(pa.timestamp("ms")), "%Y-%m-%dT%H:%M:%SZ")
    b = b.cast(a.type)
    b = b.combine_chunks() if isinstance(b, pa.ChunkedArray) else b
    if name == "latency_s":  # pandas reads 0.1662 as 0.16620000000000001
        assert pc.max(pc.abs(pc.subtract(a, b))).as_py() < 1e-12
        continue
    assert a.equals(b), (name, next((x, y) for x, y in zip(a, b) if x != y))
print(len(pairs))
"""


class Made(NamedTuple):
    """The time and the memory of a command, and the size of its file."""

    seconds: float
    peak_mib: float
    mb: float


def main() -> None:
    args = arguments(
        __doc__, "one round of 500,000 records", rounds=(3, 1), records=(1_000_000, 500_000)
    )
    n_rounds, n_records = args.rounds, args.records
    found: dict[str, list[Made]] = {OURS: [], PANDAS: [], ARROW: []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log = make_run(folder, n_records)
        log_mb = log.stat().st_size / 1e6
        print(f"{n_records:,} records, {log_mb:,.0f} MB of JSON lines")
        commands = {
            OURS: ["-m", "batchkit", "export", log.parent, "--parquet", folder / f"{OURS}.parquet"],
            PANDAS: ["-c", TO_PARQUET, log, folder / f"{PANDAS}.parquet"],
            ARROW: ["-c", TO_PARQUET_ARROW, log, folder / f"{ARROW}.parquet"],
        }
        for number in range(n_rounds):
            for kind, command in commands.items():
                path = folder / f"{kind}.parquet"
                path.unlink(missing_ok=True)
                found[kind].append(make(command, folder, path))
            if number == 0:
                compare(folder)
    results = table(found)
    sizes = {"records": n_records, "log_mb": round(log_mb), "rounds": n_rounds}
    what = f"{n_records:,} records, pandas' {{}} over ours"
    figures = [
        Figure(what.format("time"), results[PANDAS]["time_ratio"], wanted=4),
        Figure(what.format("memory"), results[PANDAS]["memory_ratio"], wanted=8),
    ]
    report("parquet", figures, **sizes, results=results)


def table(found: dict[str, list[Made]]) -> dict[str, Any]:
    """Print and return the results. A ratio is pandas' value divided by batchkit's in the same
    round."""
    print(
        f"{'':>16} {'s':>7} {'ratio':>6} {'spread':>11} {'peak MiB':>9} {'ratio':>6}"
        f" {'spread':>11} {'file MB':>8}"
    )
    results = {}
    for kind, made in found.items():
        slower = [one.seconds / own.seconds for one, own in zip(made, found[OURS], strict=True)]
        larger = [one.peak_mib / own.peak_mib for one, own in zip(made, found[OURS], strict=True)]
        results[kind] = {
            "seconds": round(statistics.median(one.seconds for one in made), 2),
            "time_ratio": round(statistics.median(slower), 2),
            "peak_mib": round(statistics.median(one.peak_mib for one in made)),
            "memory_ratio": round(statistics.median(larger), 2),
            "file_mb": round(made[-1].mb, 1),
        }
        row = results[kind]
        print(
            f"{kind:>16} {row['seconds']:>7.1f} {row['time_ratio']:>6.2f} {spread(slower):>11}"
            f" {row['peak_mib']:>9,} {row['memory_ratio']:>6.2f} {spread(larger):>11}"
            f" {row['file_mb']:>8.0f}"
        )
    return results


def make(command: Sequence[object], folder: Path, path: Path) -> Made:
    """Run Python with ``command``, which writes ``path``."""
    ended = python(folder, *command)
    return Made(ended.seconds, ended.peak_mib, path.stat().st_size / 1e6)


def compare(folder: Path) -> None:
    """Exit if a value of our file differs from that of pandas' file."""
    files = [folder / f"{kind}.parquet" for kind in (OURS, PANDAS)]
    columns = python(folder, "-c", EQUAL, *files).stdout.strip()
    print(f"equal in all values of {columns} columns")


def make_run(folder: Path, n: int) -> Path:
    """Write the log of a run of ``n`` rows: the record of one real row, and variations of it."""
    job = {
        "name": '"parquet"',
        "input.path": '"rows.jsonl"',
        "input.id": '"id"',
        "prompt.user": '"{{ question }}"',
        "engine.kind": '"dry-run"',
        "output.keep": '["topic"]',
    }
    (folder / "job.toml").write_text("".join(f"{key} = {value}\n" for key, value in job.items()))
    row = {"id": "q0", "question": "what is tea?", "topic": "drinks"}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    batchkit(folder, "run", "job.toml")
    log = folder / "output" / "parquet" / "results.jsonl"
    (log.parent / "checkpoint.json").unlink()
    record = json.loads(log.read_bytes())
    with log.open("w", encoding="utf-8") as file:
        for one in records(record, n):
            file.write(json.dumps(one, ensure_ascii=False, separators=(",", ":")) + "\n")
    return log


def records(record: dict[str, Any], n: int) -> Iterator[dict[str, Any]]:
    """Yield variations of ``record``, with indexes nearly in order."""
    rng = random.Random(0)
    letters = "eeeetttaaoinshrdlcumwfgypbvkné"
    words = ["".join(rng.choices(letters, k=rng.randint(1, 9))) for _ in range(4_000)]
    words += [" –", '"so"', "3.5 %", "\n\n"] * 100
    text = " ".join(rng.choices(words, k=400_000))
    for block in range(0, n, 64):
        for index in rng.sample(range(block, min(block + 64, n)), min(64, n - block)):
            length = min(int(rng.expovariate(1 / 350)) + 20, 4000)
            begin = rng.randrange(len(text) - length)
            usage = {"prompt_tokens": 40 + index % 700, "completion_tokens": 1 + length // 4}
            made = record | {
                "index": index,
                "id": f"q{index}",
                "text": text[begin : begin + length],
                "usage": usage,
                "latency_s": round(length / 999, 4),
                "fields": {"topic": words[index % 9]},
                "input_hash": f"{index:016x}",
            }
            if index % 100 == 99:
                error = {"kind": "timeout", "type": "RowTimeoutError", "message": f"row {index}"}
                made |= {"status": "failed", "text": None, "usage": None, "finish_reason": None}
                made |= {"error": {**error, "retryable": True}}
            yield made


if __name__ == "__main__":
    main()
