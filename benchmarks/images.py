"""batchkit against a plain script around vLLM: images from files.

    python benchmarks/images.py [--rounds 3] [--rows 120] [--quick]

Real vLLM on the demo model: once computed on the CPU, once with a simulated accelerator (8 ms a
step, 20 µs a token, 10 ms an image; accelerator.py). Answers end by a stop token. Each row has an image of its own, 1.6
megapixels, PNG and JPEG alternately, which both sides scale to 608 × 416. The script loads all
images, then calls ``LLM.generate``; loading is counted. See sides.py for what else is.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from frame import arguments
from models import build_ending_model
from PIL import Image, ImageChops, ImageFilter
from sides import GENERATE_ALL, SET, Setting, compare

STEP = {"step_ms": 8, "token_us": 20, "image_ms": 10, "median_tokens": 20}
MAX_TOKENS = 256
FILE_SIZE, SEEN_SIZE = (1536, 1024), (608, 416)
OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": 32,
    "kv_cache_memory_bytes": 2**30,
    "mm_processor_cache_gb": 0,  # no image occurs twice
    "limit_mm_per_prompt": {"image": 1, "video": 0},
}


def main() -> None:
    args = arguments(__doc__, "one round, few rows", {"set": SET}, rounds=(3, 1), rows=(120, 48))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_ending_model(folder / "model")
        rows = write(folder, args.rows)
        settings = [
            Setting("CPU", rows, None, {GENERATE_ALL: 1.3}),
            Setting("simulated", rows, STEP, {GENERATE_ALL: 1.5}),
        ]
        job = {
            "prompt": {"user": "{{ q }}", "images": ["{{ file }}"]},
            # By the rule of Qwen's own processor, 262144 pixels at most: SEEN_SIZE.
            "media": {"root": str(folder), "max_pixels": 262144, "factor": 32},
            "engine": {"model": str(folder / "model"), "options": OPTIONS},
            "sampling": {"temperature": 0, "max_tokens": MAX_TOKENS},
            "output": {"dir": str(folder / "output")},
        }
        rounds, overrides = args.rounds, args.set
        compare("images", settings, job, rounds=rounds, overrides=overrides, hold_back=True)


def write(folder: Path, n: int) -> Path:
    """Write ``n`` rows and their images. Each image shows the same clouds at another offset, with a
    box of a different color and position."""
    noise = Image.effect_noise(FILE_SIZE, 90).filter(ImageFilter.GaussianBlur(1))
    clouds = Image.merge("RGB", [ImageChops.offset(noise, 211 * c, 83 * c) for c in range(3)])
    rows: list[dict[str, Any]] = []
    for i in range(n):
        image = ImageChops.offset(clouds, 97 * i, 61 * i)
        image.paste((i * 7 % 256, i * 13 % 256, 90), (5 * i % 1200, 100, 5 * i % 1200 + 250, 600))
        name = f"{i}.{'png' if i % 2 else 'jpg'}"
        image.save(folder / name, quality=90, compress_level=1)
        rows.append({"q": f"what is in picture {i}?", "file": name, "size": SEEN_SIZE})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


if __name__ == "__main__":
    main()
