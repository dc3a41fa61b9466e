"""A run on llama.cpp's server, with one slot and with eight.

    python benchmarks/llama_slots.py [--rounds 3] [--rows 100] [--slots 1,8] [--quick]

The run starts the server itself (``[engine.server]``), on a model of 23 million random parameters,
and sends as many requests at a time as it has slots. Interleaved; a ratio is the time with the
fewest slots divided by this one's in the same round. The clock runs from the loaded model to the
last record. Needs ``llama-server``, on PATH or named by LLAMA_SERVER.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from frame import Figure, arguments, report, spread
from models import MEDIUM, build_text_model

from batchkit.commands.demo_model import SAMPLE_TEXT
from batchkit.config.loading import make_job
from batchkit.execution.processor import ProductionBatchProcessor
from tests.support.llama_cpp import NONE_FOUND, llama_server, write_gguf

MAX_MODEL_LEN, MAX_TOKENS = 512, 48


class Ran(NamedTuple):
    """The result of one run. ``texts``: the answers in the order of the rows."""

    seconds: float
    rows_per_s: float
    tokens_per_s: float
    texts: list[str]


def main() -> None:
    slots_of = {"slots": {"default": "1,8", "metavar": "N,…"}}
    args = arguments(__doc__, "one round of 40 rows", slots_of, rounds=(3, 1), rows=(100, 40))
    program = llama_server()
    if program is None:
        print(f"skipped: {NONE_FOUND}")
        report("llama_slots", [], skipped=NONE_FOUND)
        return
    slots = sorted(int(number) for number in args.slots.split(","))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "llama-server").symlink_to(program)
        os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
        model = write_gguf(build_text_model(folder / "model", MEDIUM), folder / "model.gguf")
        runs: dict[int, list[Ran]] = {number: [] for number in slots}
        for round_number in range(args.rounds):
            for number in slots:
                runs[number].append(run(model, number, args.rows, f"{number}-{round_number}"))
                seconds = f"{runs[number][-1].seconds:.2f} s"
                print(f"round {round_number + 1}, {number} slots: {seconds}", file=sys.stderr)
    table(runs, args.rows)


def run(model: Path, slots: int, rows: int, name: str) -> Ran:
    words = SAMPLE_TEXT.split()
    asked = [f"{n}: " + " ".join(words[n % 100 : n % 100 + 8 + n % 40]) for n in range(rows)]
    job = make_job(
        {
            "name": name,
            "engine": {
                "kind": "openai-server",
                "model": str(model),
                "server": {},
                "options": {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": slots},
            },
            "sampling": {"max_tokens": MAX_TOKENS},
            "output": {"dir": str(model.parent / "output")},
        },
        "benchmark",
    )
    summary = ProductionBatchProcessor(job, quiet=True).process(asked)
    if summary.ok != rows:
        raise SystemExit(f"{name}: {summary.ok} of {rows} rows ok; see {job.folder}")
    return Ran(
        summary.seconds,
        summary.rows_per_s,
        summary.completion_tokens_per_s,
        [record["text"] for record in summary.records()],
    )


def table(runs: dict[int, list[Ran]], rows: int) -> None:
    least = next(iter(runs))
    print(
        f"{'slots':>5} {'s':>7} {'rows/s':>7} {'tokens/s':>9} {'ratio':>6} {'spread':>10} {'same':>5}"
    )
    results = []
    for slots, rounds in runs.items():
        ratios = [one.seconds / many.seconds for one, many in zip(runs[least], rounds, strict=True)]
        texts = zip(runs[least][0].texts, rounds[0].texts, strict=True)
        found = {
            "slots": slots,
            "seconds": statistics.median(ran.seconds for ran in rounds),
            "rows_per_s": statistics.median(ran.rows_per_s for ran in rounds),
            "tokens_per_s": statistics.median(ran.tokens_per_s for ran in rounds),
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "equal_texts": sum(one == other for one, other in texts) / rows,
        }
        results.append(found)
        print(
            f"{slots:>5} {found['seconds']:>7.2f} {found['rows_per_s']:>7.1f}"
            f" {found['tokens_per_s']:>9.0f} {found['ratio']:>6.2f}"
            f" {spread(ratios):>10} {found['equal_texts']:>5.0%}"
        )
    figures = [
        Figure(f"{found['slots']} slots, rows/s against {least}", found["ratio"])
        for found in results[1:]
    ]
    report("llama_slots", figures, rows=rows, results=results)


if __name__ == "__main__":
    main()
