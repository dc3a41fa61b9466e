"""What the engine's own process costs: the same job in process and in its own, interleaved.

    python benchmarks/own_process.py [--rounds 3] [--rows 800] [--images 240] [--quick]

Real vLLM on the demo model, each run a fresh command; rows/s with the engine up, loading not
counted.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from frame import Figure, arguments, batchkit, report, spread
from PIL import Image

from batchkit.commands.demo_model import build_demo_model

JOB = """
name = "bench"
[input]
path = "KIND.jsonl"
[prompt]
user = "{{ q }}"
IMAGES
[media]
max_pixels = 262144
[engine]
model = "model"
[engine.options]
dtype = "float32"
enforce_eager = true
max_model_len = 1024
max_num_seqs = 32
kv_cache_memory_bytes = 536870912
mm_processor_cache_gb = 0
limit_mm_per_prompt = { image = 1, video = 0 }
[sampling]
max_tokens = 24
sampling_column = "params"
"""


def main() -> None:
    args = arguments(
        __doc__, "one round, half the rows", rounds=(3, 1), rows=(800, 400), images=(240, 120)
    )
    results = []
    print(f"{'rows':>8} {'in process/s':>14} {'own process/s':>14} {'ratio':>7} {'spread':>13}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_demo_model(folder / "model")
        for kind, rows in {
            "text": _text_rows(args.rows),
            "images": _image_rows(folder, args.images),
        }.items():
            (folder / f"{kind}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
            images = 'images = ["{{ file }}"]' if kind == "images" else ""
            job = JOB.replace("KIND", kind).replace("IMAGES", images)
            (folder / f"{kind}.toml").write_text(job)
            pairs = [
                (_run(folder, kind, in_process=True), _run(folder, kind, in_process=False))
                for _ in range(args.rounds)
            ]
            ratios = [own["rows_per_s"] / inside["rows_per_s"] for inside, own in pairs]
            found = {
                "rows": kind,
                "in_process": statistics.median(inside["rows_per_s"] for inside, _ in pairs),
                "own_process": statistics.median(own["rows_per_s"] for _, own in pairs),
                "ratio": statistics.median(ratios),
                "load_in_process_s": statistics.median(i["load_seconds"] for i, _ in pairs),
                "load_own_process_s": statistics.median(o["load_seconds"] for _, o in pairs),
            }
            results.append(found)
            print(
                f"{kind:>8} {found['in_process']:>14.1f} {found['own_process']:>14.1f}"
                f" {found['ratio']:>7.2f} {spread(ratios):>13}"
            )
    figures = [
        Figure(f"{found['rows']}, of the rate in process", found["ratio"]) for found in results
    ]
    report("own_process", figures, results=results)


def _run(folder: Path, kind: str, *, in_process: bool) -> dict[str, Any]:
    setting = f"engine.in_process={str(in_process).lower()}"
    return batchkit(folder, "run", f"{kind}.toml", "--fresh", "--set", setting).summary


def _text_rows(n: int) -> list[dict[str, Any]]:
    return [
        {"q": f"tell me of {i} " + "tea " * (i * 7 % 60), "params": _length(i)} for i in range(n)
    ]


def _image_rows(folder: Path, n: int) -> list[dict[str, Any]]:
    for i in range(12):
        picture = Image.new("RGB", (800, 600), (i * 20, 90, 160))
        picture.paste((255, 255, 255), (40 * i, 50, 40 * i + 200, 400))
        picture.save(folder / f"{i}.png")
    return [{"q": f"what is {i}?", "file": f"{i % 12}.png", "params": _length(i)} for i in range(n)]


def _length(i: int) -> dict[str, int]:
    """Heavy-tailed, as answers are: most are short, a few are ten times as long."""
    return {"max_tokens": (6, 9, 12, 16, 24, 8, 96, 11)[i * 5 % 8]}


if __name__ == "__main__":
    main()
