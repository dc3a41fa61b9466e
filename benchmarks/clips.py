"""batchkit against a plain script around vLLM: recordings from files, through a speech model.

    python benchmarks/clips.py [--rounds 3] [--rows 1000] [--only NAME] [--quick]

Real vLLM on the demo speech model: once computed on the CPU, once with a simulated accelerator (8 ms a step, 20 µs a
token, 5 ms a recording; accelerator.py). Each row is a recording of 2 to 8 seconds of its own, FLAC and WAV alternately. The script loads all
of them as vLLM's examples do (with the package soundfile, which must be installed), then calls ``LLM.generate``; loading is counted. See sides.py for what else is.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import av
import numpy as np
from frame import arguments
from sides import GENERATE_ALL, ONLY, SET, Setting, compare

from batchkit.commands.demo_digits import SAMPLE_RATE, make_recording
from batchkit.config.tables import EngineTable

MODEL = EngineTable(model="batchkit-demo-speech").model_source
DIGITS = 15, 10  # the first of their tokens, and how many there are
STEP = {"step_ms": 8, "token_us": 20, "image_ms": 5, "median_tokens": 20, "words": DIGITS}
OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 96,
    "max_num_seqs": 32,
    "kv_cache_memory_bytes": 2**30,
    "mm_processor_cache_gb": 0,  # no recording occurs twice
    "limit_mm_per_prompt": {"audio": 1},
}
PROMPT = "<|startoftranscript|><|en|><|transcribe|>"


def main() -> None:
    more = {"set": SET, "only": ONLY}
    args = arguments(__doc__, "one round, few rows", more, rounds=(3, 1), rows=(1000, 48))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = write(folder, args.rows)
        settings = [
            Setting("CPU", rows, None, {GENERATE_ALL: 1.3}),
            Setting("simulated", rows, STEP, {GENERATE_ALL: 1.3}),
        ]
        settings = [it for it in settings if not args.only or it.name in args.only]
        job = {
            "prompt": {"chat": False, "user": "{{ q }}", "audios": ["{{ clip }}"]},
            "media": {"root": str(folder)},
            "engine": {"model": MODEL, "options": OPTIONS},
            "sampling": {"temperature": 0, "max_tokens": 88},
            "output": {"dir": str(folder / "output")},
        }
        rounds, overrides = args.rounds, args.set
        compare("clips", settings, job, rounds=rounds, overrides=overrides, hold_back=True)


def write(folder: Path, n: int) -> Path:
    random, rows = Random(0), list[dict[str, Any]]()
    for number in range(n):
        made = make_recording(random, random.uniform(2, 8))
        while len(made.digits) < 2:  # an empty answer would be a failed row
            made = make_recording(random, random.uniform(2, 8))
        path = folder / f"{number}.{'wav' if number % 2 else 'flac'}"
        encode(path, made.samples)
        rows.append({"q": PROMPT, "clip": str(path)})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def encode(path: Path, samples: Any) -> None:
    with av.open(str(path), "w") as clip:
        codec = "pcm_s16le" if path.suffix == ".wav" else "flac"
        stream: Any = clip.add_stream(codec, rate=SAMPLE_RATE, layout="mono")
        whole = av.AudioFrame.from_ndarray((samples * 32767).astype(np.int16)[None], "s16", "mono")
        whole.sample_rate = SAMPLE_RATE
        size = stream.frame_size or 4096
        resampler = av.AudioResampler(stream.format, "mono", SAMPLE_RATE, size)
        for frame in (*resampler.resample(whole), *resampler.resample(None)):
            clip.mux(stream.encode(frame))
        clip.mux(stream.encode())


if __name__ == "__main__":
    main()
