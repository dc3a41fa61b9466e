"""batchkit against a plain script around vLLM: recordings from files, through a speech model.

    python benchmarks/clips.py [--rounds 3] [--rows 1000] [--only NAME] [--quick]

Real vLLM on the demo speech model: once computed on the CPU, once with a simulated accelerator (8 ms a step, 20 µs a
token, 5 ms a recording; accelerator.py). Each row is a recording of its own, 2 to 8 seconds, in two settings: FLAC and WAV alternately,
at the model's 16 kHz, which nobody has to resample; and MP3 at 48 kHz, mono, 64 kbit/s, as in Common Voice.

The script calls vLLM's ``load_audio`` for all of them, as vLLM's examples do (its ``AudioAsset``), then ``LLM.generate``; loading is counted.
It reads with the package soundfile, which must be installed. Of an MP3 it asks ``load_audio`` for 16 kHz: by default vLLM would resample
by torchaudio, which takes longer and has no build for this CPU. batchkit decodes and resamples by PyAV, in its isolated process.
The two decoders of MP3 differ by a rounding, so the simulated answers depend on the prompt there. See sides.py for what else is counted.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import av
import numpy as np
from frame import arguments
from sides import GENERATE_ALL, ONLY, SET, Setting, compare, read

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
PLAIN = ("flac", "wav")
MP3 = ("mp3",)
CODECS = {
    ".flac": ("flac", SAMPLE_RATE),
    ".wav": ("pcm_s16le", SAMPLE_RATE),
    ".mp3": ("libmp3lame", 48_000),
}
BIT_RATE = 64_000  # of MP3


def main() -> None:
    more = {"set": SET, "only": ONLY}
    args = arguments(__doc__, "one round, few rows", more, rounds=(3, 1), rows=(1000, 48))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows, mp3 = write(folder, args.rows), write(folder, args.rows, MP3)
        settings = [
            Setting("CPU", rows, None, {GENERATE_ALL: 1.3}),
            Setting("simulated", rows, STEP, {GENERATE_ALL: 1.3}),
            Setting("CPU MP3", mp3, None, {GENERATE_ALL: 1.3}),
            Setting(
                "simulated MP3", numbered(mp3), {**STEP, "by_prompt": True}, {GENERATE_ALL: 1.3}
            ),
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


def write(folder: Path, n: int, suffixes: Sequence[str] = PLAIN) -> Path:
    """Rows whose recordings are in each of the formats in turn."""
    random, rows = Random(0), list[dict[str, Any]]()
    for number in range(n):
        made = make_recording(random, random.uniform(2, 8))
        while len(made.digits) < 2:  # an empty answer would be a failed row
            made = make_recording(random, random.uniform(2, 8))
        path = folder / f"{number}.{suffixes[number % len(suffixes)]}"
        encode(path, made.samples)
        rows.append({"q": PROMPT, "clip": str(path)})
    return write_rows(folder / f"{suffixes[0]}.jsonl", rows)


def numbered(rows: Path) -> Path:
    """Write the same rows with a different prompt for each: the row's number, as the preceding
    speech."""
    found = [{**row, "q": f"<|startofprev|>{n}{PROMPT}"} for n, row in enumerate(read(rows))]
    return write_rows(rows.with_stem("numbered"), found)


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def encode(path: Path, samples: Any) -> None:
    codec, rate = CODECS[path.suffix]
    with av.open(str(path), "w") as clip:
        stream: Any = clip.add_stream(codec, rate=rate, layout="mono")
        if path.suffix == ".mp3":
            stream.bit_rate = BIT_RATE
        whole = av.AudioFrame.from_ndarray((samples * 32767).astype(np.int16)[None], "s16", "mono")
        whole.sample_rate = SAMPLE_RATE
        size = stream.frame_size or 4096
        resampler = av.AudioResampler(stream.format, "mono", rate, size)
        for frame in (*resampler.resample(whole), *resampler.resample(None)):
            clip.mux(stream.encode(frame))
        clip.mux(stream.encode())


if __name__ == "__main__":
    main()
