"""The gain from ordering the rows: batchkit with its look-ahead and without it.

    python benchmarks/order.py [--rounds 3] [--quick]

Real vLLM with a simulated accelerator (accelerator.py). Two inputs, shuffled:
- images: six questions to each image (RealHiTBench has 5.7). 8 ms a step, 20 µs a token, 10 ms an
  image.
- documents: six questions to each of 100 texts of about 300 tokens; 16 requests at once, and a KV
  cache that holds about a tenth of the texts beside them. 8 ms a step, 20 µs a token. The cache's
  blocks have 32 tokens, the least that vLLM takes on a CPU (its default on a GPU is 16, on a CPU 128:
  then only 256 tokens of each text would be shared).
The rows come from files on both sides, and are rendered while the model loads on both.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import images
import text
from frame import arguments
from sides import IN_ORDER, Setting, compare

from batchkit.commands.demo_model import SAMPLE_TEXT, build_demo_model

QUESTIONS = 6
TOKENS = {"step_ms": 8, "token_us": 20, "image_ms": 0, "median_tokens": 12}


def main() -> None:
    args = arguments(__doc__, "one round, half the rows", rounds=(3, 1), subjects=(50, 25))
    subjects = args.subjects
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_demo_model(folder / "text", text_only=True)
        build_demo_model(folder / "model")
        text_engine = {"model": str(folder / "text"), "options": text.OPTIONS}
        small_cache = {
            "max_model_len": 1024,
            "max_num_seqs": 16,
            "kv_cache_memory_bytes": 4 * 2**20,
            "block_size": 32,
        }
        settings = [
            Setting(
                "images",
                write_images(folder, subjects),
                images.STEP,
                {IN_ORDER: None},
                {
                    "prompt": {"user": "{{ q }}", "images": ["{{ file }}"]},
                    "media": {"root": str(folder), "max_pixels": 262144, "factor": 32},
                    "engine": {
                        "model": str(folder / "model"),
                        "options": {**images.OPTIONS, "mm_processor_cache_gb": 0.25},
                    },
                },
            ),
            Setting(
                "documents",
                write_documents(folder / "documents.jsonl", 2 * subjects),
                TOKENS,
                {IN_ORDER: 1.3},
                {"engine": {**text_engine, "options": {**text.OPTIONS, **small_cache}}},
            ),
        ]
        job = {
            "prompt": {"user": "{{ q }}"},
            "engine": text_engine,
            "sampling": {"temperature": 0, "max_tokens": 64},
            "output": {"dir": str(folder / "output")},
        }
        compare("order", settings, job, rounds=args.rounds)


def write_images(folder: Path, subjects: int) -> Path:
    rows = [json.loads(line) for line in images.write(folder, subjects).open()]
    asked = [{**row, "q": f"{n}: {row['q']}"} for row in rows for n in range(QUESTIONS)]
    return shuffled(folder / "images.jsonl", asked)


def write_documents(path: Path, subjects: int) -> Path:
    draw = random.Random(1)
    words = SAMPLE_TEXT.replace(".", "").replace(",", "").split()
    rows: list[dict[str, Any]] = []
    for _ in range(subjects):
        document = " ".join(draw.choices(words, k=300))
        asked = [f"Read this: {document}. Question {n}?" for n in range(QUESTIONS)]
        rows += [{"q": question} for question in asked]
    return shuffled(path, rows)


def shuffled(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    rows = random.Random(2).sample(rows, len(rows))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


if __name__ == "__main__":
    main()
