"""batchkit against plain scripts around vLLM: text, answers of heavy-tailed length.

    python benchmarks/text.py [--rounds 3] [--only NAME] [--quick]

Real vLLM with a simulated accelerator (accelerator.py) of five shapes: how many requests run at once
(max_num_seqs), and how long a step takes. On both sides vLLM's core and worker are in one process of
their own, as on a GPU; "here" is where a CPU user has them. And once computed on the CPU (a model of 23 million
parameters, models.py). Against one ``LLM.generate`` of all rows and, where 64 requests run at once,
one for each 64.

Answers end by a stop token; max_tokens is the same for all. Lengths are lognormal with the median 60
on the simulated accelerator, and what the model does on the CPU. See sides.py for what is counted.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from frame import arguments
from models import MEDIUM, build_text_model
from sides import BATCHES_OF_64, GENERATE_ALL, ONLY, SET, Setting, compare

from batchkit.commands.demo_model import SAMPLE_TEXT, build_demo_model

MEDIAN_TOKENS, MAX_TOKENS = 60, 512
# An empty answer would be a failure, and asked for again.
SAMPLING = {"temperature": 0, "max_tokens": MAX_TOKENS, "min_tokens": 1}
OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "kv_cache_memory_bytes": 2**30,
}


class Shape(NamedTuple):
    max_num_seqs: int
    step_ms: float
    rows: int


SHAPES = (
    Shape(256, 4, 2000),
    Shape(256, 12, 2000),
    Shape(1024, 15, 5000),
    Shape(64, 15, 600),
    Shape(512, 0.01, 4000),  # bound by the host
)
BUSY = 0.2  # of a core, where the accelerator answers synchronously
STEP = {"step_ms": 15, "token_us": 0, "image_ms": 0, "median_tokens": MEDIAN_TOKENS}


def main() -> None:
    options = {"only": ONLY, "set": SET}
    args = arguments(__doc__, "one round, a fifth of the rows", options, rounds=(3, 1))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_demo_model(folder / "model", text_only=True)
        job = {
            "prompt": {"user": "{{ q }}"},
            "engine": {"model": str(folder / "model"), "options": OPTIONS},
            "sampling": SAMPLING,
            "output": {"dir": str(folder / "output")},
        }
        found = [
            setting
            for setting in settings(folder, share=0.2 if args.quick else 1)
            if not args.only or setting.name in args.only
        ]
        compare("text", found, job, rounds=args.rounds, overrides=args.set)


def settings(folder: Path, share: float) -> Iterator[Setting]:
    for seqs, step_ms, n in SHAPES:
        rows = write(folder / f"{n}.jsonl", round(share * n))
        costs = {**STEP, "step_ms": step_ms, "token_us": 4}
        options = {**OPTIONS, "max_num_seqs": seqs}
        engine = {"engine": {"model": str(folder / "model"), "options": options}}
        wanted = {GENERATE_ALL: 1.0} | ({BATCHES_OF_64: 3.0} if seqs == 64 else {})
        if step_ms < 1:
            costs["token_us"] = 0
        name = f"{seqs}x{step_ms}"
        yield Setting(name, rows, costs, wanted, engine, as_on_gpu=True)
        if step_ms >= 1:
            busy = {**costs, "busy": BUSY}
            yield Setting(f"{name} sync", rows, busy, {GENERATE_ALL: 1.0}, engine, as_on_gpu=True)
        if (seqs, step_ms) == (256, 4):
            yield Setting(f"{name} here", rows, costs, {GENERATE_ALL: 1.0}, engine)
    medium = build_text_model(folder / "medium", MEDIUM)
    engine = {"engine": {"model": str(medium), "options": {**OPTIONS, "max_num_seqs": 64}}}
    rows = write(folder / "cpu.jsonl", round(share * 300))
    yield Setting("CPU", rows, None, {GENERATE_ALL: 1.05, BATCHES_OF_64: 1.6}, engine)


def write(path: Path, n: int) -> Path:
    draw = random.Random(0)
    words = SAMPLE_TEXT.replace(".", "").replace(",", "").split()
    with path.open("w") as rows:
        for i in range(n):
            topic = " ".join(draw.choices(words, k=draw.randint(5, 60)))
            rows.write(json.dumps({"q": f"{i}: what of {topic}?"}) + "\n")
    return path


if __name__ == "__main__":
    main()
