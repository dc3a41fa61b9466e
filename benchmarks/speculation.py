"""n-gram speculation on a pretrained model: one job that rewrites texts, without and with it.

    python benchmarks/speculation.py [--rounds 3] [--rows 300] [--sizes 4] [--quick]

SmolLM2-135M, float32, greedy. Each row is two short reviews in small letters, and the job asks for them with correct
capital letters, so that most tokens of an answer are in its prompt. The two runs of a round follow each other; a rate
counts from the loaded model on. Speculation computes several tokens of a request in one step, which costs little only if
a step spends its time on reading weights, so the gain depends on max_num_seqs (``--sizes``). ``batchkit compare`` compares
the answers.

Needs ``make real-models``. Set OMP_NUM_THREADS=1 if other programs use the machine: two threads wait for each other at
each operator, which made both runs five times slower at a load of 4 on two cores.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice, permutations
from pathlib import Path
from typing import Any, NamedTuple

import tomlkit
from frame import HERE, Figure, arguments, batchkit, report, spread

TASK = "Rewrite this review with correct capital letters. Change nothing else.\n\n{{ review }}"
GUESSES = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
OPTIONS = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512}
OPTIONS |= {"kv_cache_memory_bytes": 512 * 2**20}
WANTED = 1.2


class Ran(NamedTuple):
    """A run. ``accepted``: guessed tokens that a step accepted for a request, on average."""

    rows_per_s: float
    tokens_per_s: float
    accepted: float | None


def main() -> None:
    more = {"sizes": {"default": "4", "help": "values of max_num_seqs"}}
    args = arguments(__doc__, "one round of 20 rows", more, rounds=(3, 1), rows=(300, 20))
    sizes = [int(size) for size in args.sizes.split(",")]
    paths = [str(HERE.parent), str(HERE.parent / "scripts")]
    sys.path[1:1] = paths
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    figures = []
    print("max_num_seqs  speculation  rows/s  tokens/s  accepted  ratio       spread   equal")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = (json.dumps(row) + "\n" for row in islice(rows(), args.rows))
        (folder / "rows.jsonl").write_text("".join(lines))
        for size in sizes:
            plain, guessed = zip(*(pair(folder, size, n) for n in range(args.rounds)), strict=True)
            show(size, "none", plain, plain, "")
            show(size, "n-gram", guessed, plain, equal(folder, size, args.rounds))
            ratio = statistics.median(ratios(guessed, plain))
            figures.append(Figure(f"n-gram, max_num_seqs {size}", ratio, wanted=WANTED))
    threads = os.environ.get("OMP_NUM_THREADS")
    load = round(os.getloadavg()[0], 1)
    report("speculation", figures, rounds=args.rounds, load=load, threads=threads)


def rows() -> Iterator[dict[str, str]]:
    """Yield rows that are all different."""
    from tests.support.real_models import reviews

    for first, second in permutations(reviews(), 2):
        yield {"review": f"{first['review']} {second['review']}".lower()}


def pair(folder: Path, size: int, number: int) -> tuple[Ran, Ran]:
    return run(folder, f"plain-{size}-{number}", size, {}), run(
        folder, f"ngram-{size}-{number}", size, {"speculative_config": GUESSES}
    )


def run(folder: Path, name: str, size: int, options: dict[str, Any]) -> Ran:
    from tests.support.real_models import real_model

    engine = {"model": str(real_model("smollm2-135m-instruct"))}
    job = {
        "name": name,
        "input": {"path": "rows.jsonl"},
        "prompt": {"user": TASK},
        "engine": {**engine, "options": {**OPTIONS, "max_num_seqs": size, **options}},
        "sampling": {"temperature": 0, "max_tokens": 128},
    }
    (folder / f"{name}.toml").write_text(tomlkit.dumps(job))
    ran = batchkit(folder, "run", f"{name}.toml").summary
    status = batchkit(folder, "status", f"output/{name}", "--json").summary
    found = Ran(
        ran["rows_per_s"], ran["completion_tokens_per_s"], status["accepted_tokens_per_step"]
    )
    print(f"{name}: {found}", file=sys.stderr, flush=True)
    return found


def ratios(runs: Sequence[Ran], others: Sequence[Ran]) -> list[float]:
    pairs = zip(runs, others, strict=True)
    return [run.rows_per_s / other.rows_per_s for run, other in pairs]


def equal(folder: Path, size: int, rounds: int) -> str:
    """Return how many answers of the last round are equal, as ``batchkit compare`` counts them."""
    names = [f"{way}-{size}-{rounds - 1}" for way in ("plain", "ngram")]
    compared = batchkit(folder, "compare", *(f"output/{name}" for name in names), "--json").summary
    found = compared["answers"][names[1]]
    return f"{found['equal']}/{found['equal'] + found['differ']}"


def show(size: int, way: str, runs: Sequence[Ran], others: Sequence[Ran], equal: str) -> None:
    rates, tokens = (statistics.median(run[n] for run in runs) for n in range(2))
    accepted = "" if runs[-1].accepted is None else f"{runs[-1].accepted:.2f}"
    found = ratios(runs, others)
    print(
        f"{size:12} {way:>12} {rates:7.2f} {tokens:9.1f} {accepted:>9}"
        f" {statistics.median(found):6.2f} {spread(found):>12} {equal:>7}",
        flush=True,
    )


if __name__ == "__main__":
    main()
