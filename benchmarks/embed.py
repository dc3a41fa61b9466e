"""batchkit against a plain script around vLLM: embeddings of 5,000 texts of heavy-tailed length.

    python benchmarks/embed.py [--rounds 3] [--only NAME] [--quick]

Against one ``LLM.embed`` of all texts, which then saves one matrix for numpy. batchkit writes each
vector and its record to disk while it runs. Once with a simulated accelerator (accelerator.py), and
once computed on the CPU with a small model. Lengths are lognormal; the longest text has about 30
times the tokens of half of them. See sides.py for what is counted.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

from frame import arguments
from models import build_text_model
from sides import EMBED_ALL, ONLY, SET, Setting, compare

from batchkit.commands.demo_model import SAMPLE_TEXT

SIGMA = 0.9  # of the lengths' logarithm, as in accelerator.py
N = 5000
MAX_TOKENS = 2048
OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": MAX_TOKENS,
    "kv_cache_memory_bytes": 2**30,
}
# As a model of 0.6 billion parameters on one large GPU: 200,000 tokens a second at most.
STEP = {"step_ms": 5, "token_us": 5, "image_ms": 0}
WIDE = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 2}
# Four million parameters, so that 5,000 texts take less than a minute on two cores.
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def main() -> None:
    options = {"only": ONLY, "set": SET}
    args = arguments(
        __doc__, "one round, a fifth of the texts", options, rounds=(3, 1), rows=(N, N // 5)
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = {
            "task": "embed",
            "prompt": {"user": "{{ q }}"},
            "output": {"dir": str(folder / "output")},
        }
        found = [
            setting
            for setting in settings(folder, args.rows)
            if not args.only or setting.name in args.only
        ]
        compare("embed", found, job, rounds=args.rounds, overrides=args.set)


def settings(folder: Path, n: int) -> Iterator[Setting]:
    wide, small = (build_text_model(folder / name, shape) for name, shape in
                   (("wide", WIDE), ("small", SMALL)))  # fmt: skip
    wanted = {EMBED_ALL: 1.0}
    for name, model, costs, median in (("simulated", wide, STEP, 60), ("CPU", small, None, 20)):
        engine = {"engine": {"model": str(model), "options": OPTIONS}}
        rows = write(folder / f"{name}.jsonl", n, median)
        yield Setting(name, rows, costs, wanted, engine)


def write(path: Path, n: int, median_words: int) -> Path:
    draw = random.Random(0)
    words = SAMPLE_TEXT.replace(".", "").replace(",", "").split()
    with path.open("w") as rows:
        for i in range(n):
            length = round(median_words * draw.lognormvariate(0, SIGMA))
            text = " ".join(draw.choices(words, k=max(3, min(length, MAX_TOKENS // 4))))
            rows.write(json.dumps({"q": f"{i}: {text}"}) + "\n")
    return path


if __name__ == "__main__":
    main()
