"""Equal requests computed once (``run.deduplicate``), and answers of an earlier run (``run.reuse``).

    python benchmarks/duplicates.py [--rounds 3] [--rows 10000] [--reused 1000000] [--quick]

- Duplicates: rows of which 40 % repeat an earlier one, shuffled, on real vLLM (the demo model, float32,
  greedy), with ``run.deduplicate`` and without it, interleaved. The rate is that of the loaded engine. A
  request has reached the engine if its record has ``usage``. The answers must be equal.
- Reuse: the dry-run engine, and a run of which another run has answered the first nine tenths, which is
  the hard case: all of them are copied before the first new row. The time is from the start of the
  process to the first record on disk that is no copy. The index of the other run is built within it, and
  once more by itself. A changed prompt, engine option, model or adapter must reuse nothing.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomlkit
from frame import HERE, JOB, Figure, arguments, batchkit, python, report, spread, write_rows

REPEATED, ANSWERED = 0.4, 0.9
SIDES = {"on": "true", "off": "false"}
OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 64,
    "kv_cache_memory_bytes": 2**28,
}
FEW = 1000
CHANGES = {
    "prompt": ["prompt.user=Answer in two sentences: {{ question }}"],
    "engine option": ["engine.options.latency_s=1e-9"],
    "model": ["engine.model=other"],
    "adapter": ["prompt.lora=other"],
    "sampling": ["sampling.max_tokens=7"],
}
INDEX = """
import resource, sys, time
from pathlib import Path
from batchkit.storage.answers import AnswerIndex
began = time.perf_counter()
AnswerIndex(Path(sys.argv[1])).close()
print(time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


class Run(NamedTuple):
    rows_per_s: float
    n_asked: int
    answers: list[str]


def main() -> None:
    numbers = {"rounds": (3, 1), "rows": (10_000, 500), "reused": (1_000_000, 50_000)}
    args = arguments(__doc__, "one round, few rows", **numbers)
    with tempfile.TemporaryDirectory() as name:
        found = [*duplicates(Path(name), args.rows, args.rounds)]
    with tempfile.TemporaryDirectory() as name:
        found += reuse(Path(name), args.reused, is_full=not args.quick)
    report("duplicates", found, rounds=args.rounds)


def duplicates(folder: Path, n_rows: int, rounds: int) -> Iterator[Figure]:
    """Compare runs with and without ``run.deduplicate``, and print a table."""
    n_different = write_duplicates(folder / "rows.jsonl", n_rows)
    batchkit(folder, "demo", "model", "model", "--text-only")
    (folder / "job.toml").write_text(tomlkit.dumps(job()))
    runs: dict[str, list[Run]] = {side: [] for side in SIDES}
    for number in range(rounds):
        for side in SIDES:
            runs[side].append(one(folder, side, number))
    print(f"{n_rows:,} rows, of which {n_rows - n_different:,} repeat an earlier one, real vLLM:")
    print(f"{'run.deduplicate':>16} {'requests':>9} {'records':>8} {'rows/s':>7} {'spread':>15}")
    for side, its in runs.items():
        speeds = [run.rows_per_s for run in its]
        asked, records = {run.n_asked for run in its}, {len(run.answers) for run in its}
        print(
            f"{SIDES[side]:>16} {max(asked):>9,} {min(records):>8,}"
            f" {statistics.median(speeds):>7,.1f} {spread(speeds, 1):>15}"
        )
    ratios = [on.rows_per_s / off.rows_per_s for on, off in zip(*runs.values(), strict=True)]
    expected = runs["off"][0].answers
    equal = min(
        sum(a == b for a, b in zip(run.answers, expected, strict=True)) for run in runs["on"]
    )
    print(f"rate {statistics.median(ratios):.2f} × ({spread(ratios)}), {equal:,} answers equal\n")
    yield Figure("rate with deduplicate, 40 % repeat", statistics.median(ratios), wanted=1.5)
    asked = max(run.n_asked for run in runs["on"])
    yield Figure("requests computed", asked, "requests", n_different, at_most=True)
    yield Figure("equal answers", equal, "rows", n_rows)


def write_duplicates(path: Path, n_rows: int) -> int:
    """Write the rows, and return how many of them are different."""
    draw = random.Random(0)
    n_different = n_rows - round(REPEATED * n_rows)
    numbers = [*range(n_different), *draw.choices(range(n_different), k=n_rows - n_different)]
    draw.shuffle(numbers)
    rows = [{"q": f"what is the capital of country {number}?"} for number in numbers]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return n_different


def job() -> dict[str, Any]:
    return {
        "input": {"path": "rows.jsonl"},
        "prompt": {"user": "{{ q }}"},
        "engine": {"model": "model", "options": OPTIONS},
        "sampling": {"temperature": 0, "max_tokens": 32, "min_tokens": 1},
        "output": {"keep": []},
    }


def one(folder: Path, side: str, number: int) -> Run:
    name = f"{side}-{number}"
    options = ["--set", f"name={name}", "--set", f"run.deduplicate={SIDES[side]}"]
    summary = batchkit(folder, "run", "job.toml", *options).summary
    records = sorted(lines_of(folder / "output" / name), key=lambda record: record["index"])
    n_asked = sum(record["usage"] is not None for record in records)
    return Run(summary["rows_per_s"], n_asked, [record["text"] for record in records])


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "results.jsonl").open()]


def reuse(folder: Path, n_rows: int, *, is_full: bool) -> Iterator[Figure]:
    """Reuse the answers to nine tenths of the rows, and print what it takes."""
    n_answered = round(ANSWERED * n_rows)
    write_rows(folder / "rows.jsonl", n_rows)
    (folder / "job.toml").write_text(JOB)
    batchkit(folder, "run", "job.toml", "--set", "name=before", "--limit", n_answered)
    before = folder / "output" / "before"
    index_s, index_mib = map(
        float, python(HERE, "-c", INDEX, before / "results.jsonl").stdout.split()
    )
    index_bytes = (before / "answers.index").stat().st_size
    (before / "answers.index").unlink()
    watch = FirstNew(folder / "output" / "counting" / "results.jsonl")
    options = ["--reuse", "output/before"]
    ended = batchkit(folder, "run", "job.toml", *options, meanwhile=watch.is_awaited, every_s=0.05)
    if ended.summary["reused"] != n_answered or ended.summary["ok"] != n_rows:
        raise SystemExit(f"reused: {ended.summary}")
    print(
        f"{n_rows:,} rows, of which another run has answered the first {n_answered:,}, dry-run engine:"
    )
    print(f"  first new record after {watch.seconds:.1f} s, all after {ended.seconds:.1f} s")
    print(f"  peak memory {ended.peak_mib:.0f} MiB")
    print(
        f"  index built in {index_s:.1f} s, {index_mib:.0f} MiB, {index_bytes / 2**20:.0f} MiB on disk"
    )
    changed = {what: reused_after(folder, change) for what, change in CHANGES.items()}
    print("  rows reused after a change:", ", ".join(f"{k} {n}" for k, n in changed.items()))
    limit_s, limit_mib = (20, 300) if is_full else (None, None)
    yield Figure("first new row, 9 of 10 reused", watch.seconds, "s", limit_s, at_most=True)
    yield Figure("memory of reuse", ended.peak_mib, "MiB", limit_mib, at_most=True)
    yield Figure("index of the other run", index_s, "s")
    yield Figure("rows reused after a change", sum(changed.values()), "rows", 0, at_most=True)


class FirstNew:
    """A watcher of a log. ``seconds``: when the first record was written that is no copy."""

    def __init__(self, log: Path) -> None:
        self._log, self._began, self._end = log, time.perf_counter(), 0
        self.seconds = 0.0

    def is_awaited(self) -> bool:
        if not self._log.exists():
            return True
        with self._log.open("rb") as lines:
            lines.seek(self._end)
            content = lines.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._end += len(whole)
        if whole.count(b"\n") > whole.count(b'"reused_from":'):
            self.seconds = time.perf_counter() - self._began
        return not self.seconds


def reused_after(folder: Path, change: Sequence[str]) -> int:
    sets = [word for one in ["name=changed", *change] for word in ("--set", one)]
    options = ["--limit", FEW, "--reuse", "output/before", "--fresh"]
    return int(batchkit(folder, "run", "job.toml", *sets, *options).summary["reused"])


if __name__ == "__main__":
    main()
