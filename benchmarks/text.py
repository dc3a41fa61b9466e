"""batchkit against plain scripts around vLLM: text, answers of heavy-tailed length.

    python benchmarks/text.py [--rounds 3] [--rows 300] [--quick]

Real vLLM: once computed on the CPU (a model of 23 million parameters, models.py), once with a
simulated accelerator whose steps take 15 ms whatever is in them (accelerator.py). Against one
``LLM.generate`` of all rows, and one for each 32 or 64. Lengths are Pareto (shape 0.9) from 4 to
256 tokens, the same on all sides, since min_tokens is max_tokens.

So each row's max_tokens is the length of its answer, and batchkit begins with the longest. If
lengths are not known beforehand, the side "in order" is the relevant one. See sides.py for what is
counted.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from models import MEDIUM, build_text_model
from sides import GENERATE_ALL, IN_ORDER, Setting, compare

from batchkit.commands.demo_model import SAMPLE_TEXT, build_demo_model

STEP = {"step_ms": 15, "token_us": 0, "image_ms": 0}
OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 64,
    "kv_cache_memory_bytes": 2**30,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE of batchkit's job")
    parser.add_argument("--quick", action="store_true", help="one round, two sides less")
    args = parser.parse_args()
    if args.quick:
        args.rounds = 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_demo_model(folder / "model", text_only=True)
        medium = build_text_model(folder / "medium", MEDIUM)
        own = {"engine": {"model": str(medium), "options": OPTIONS}}
        rows = write(folder / "rows.jsonl", args.rows)
        settings = [
            Setting("CPU", rows, None, {GENERATE_ALL: 1.05, "batches of 64": 1.6}, own),
            Setting("simulated", rows, STEP, {GENERATE_ALL: 0.98, "batches of 64": 3.5}),
        ]
        job = {
            "prompt": {"user": "{{ q }}"},
            "engine": {"model": str(folder / "model"), "options": OPTIONS},
            "sampling": {"temperature": 0, "sampling_column": "params"},
            "output": {"dir": str(folder / "output")},
        }
        sides = [GENERATE_ALL, "batches of 64"]
        if not args.quick:
            sides += [IN_ORDER, "batches of 32"]
        compare("text", settings, sides, job, rounds=args.rounds, overrides=args.set)


def write(path: Path, n: int) -> Path:
    draw = random.Random(0)
    words = SAMPLE_TEXT.replace(".", "").replace(",", "").split()
    rows: list[dict[str, Any]] = []
    for i in range(n):
        topic = " ".join(draw.choices(words, k=draw.randint(5, 60)))
        tokens = min(256, int(4 * draw.paretovariate(0.9)))
        params = {"min_tokens": tokens, "max_tokens": tokens}
        rows.append({"q": f"{i}: what of {topic}?", "params": params})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


if __name__ == "__main__":
    main()
