"""Recordings of digits for the demo speech model: each digit is a pair of telephone tones.

The same seed gives the same recording. Tests use other seeds than the training of the model.
"""

from __future__ import annotations

import json
import wave
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
from numpy import float32
from numpy.typing import NDArray

from batchkit.commands.demo_tables import filling

SAMPLE_RATE = 16_000
_LOW = {"1": 697, "2": 697, "3": 697, "4": 770, "5": 770, "6": 770, "7": 852, "8": 852, "9": 852}
_HIGH = {"1": 1209, "4": 1209, "7": 1209, "2": 1336, "5": 1336, "8": 1336, "0": 1336}
_FADE_S = 0.01
_LONG_PAUSE = 0.1  # fraction of the pauses that are long


class Heard(NamedTuple):
    """A digit in a recording, with its start and end in seconds."""

    digit: str
    start: float
    end: float


class DigitRecording(NamedTuple):
    samples: NDArray[float32]
    digits: list[Heard]


def build_demo_digits(folder: Path, *, count: int = 40, minutes: float = 10, seed: int = 0) -> None:
    """Write ``count`` short recordings and one of ``minutes`` minutes to ``folder``, with their texts and times in
    ``recordings.jsonl``.

    Raises:
        JobError: ``folder`` is not empty, or can't be written.
    """
    with filling(folder):
        random = Random(f"test {seed}")
        (folder / "clips").mkdir(parents=True, exist_ok=True)
        lengths = [random.uniform(5, 30) for _ in range(count)] + [60 * minutes] * (minutes > 0)
        lines = []
        for number, seconds in enumerate(lengths, 1):
            made = make_recording(random, seconds)
            name = f"clips/{number:02}.wav"
            write_wav(folder / name, made.samples)
            text = " ".join(heard.digit for heard in made.digits)
            times = [[heard.start, heard.end] for heard in made.digits]
            row = {"id": number, "recording": name, "text": text, "times": times}
            lines.append(json.dumps(row) + "\n")
        (folder / "recordings.jsonl").write_text("".join(lines), encoding="utf-8")


def make_recording(random: Random, seconds: float) -> DigitRecording:
    """Return a recording of ``seconds`` seconds: random digits with pauses between them, over noise."""
    noise = np.random.default_rng(random.getrandbits(64))
    samples = noise.standard_normal(round(seconds * SAMPLE_RATE), np.float32)
    samples *= 10 ** random.uniform(-4, -2.3)
    loud, digits = 10 ** random.uniform(-1.2, -0.4), list[Heard]()
    at = random.uniform(0, 1.0 if random.random() < 0.7 else 4.0)
    while at + (length := random.uniform(0.2, 0.4)) < seconds:
        digit = random.choice("0123456789")
        tone = loud * random.uniform(0.6, 1) * _tone(digit, length)
        start = round(at * SAMPLE_RATE)
        samples[start : start + len(tone)] += tone[: len(samples) - start]
        digits.append(Heard(digit, round(at, 3), round(at + length, 3)))
        is_long = random.random() < _LONG_PAUSE
        at += length + random.uniform(1, 3) if is_long else length + random.uniform(0.15, 0.9)
    return DigitRecording(samples.clip(-1, 1), digits)


def write_wav(path: Path, samples: NDArray[float32]) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes((samples * 32767).astype("<i2").tobytes())


def _tone(digit: str, seconds: float) -> NDArray[float32]:
    at = np.arange(round(seconds * SAMPLE_RATE), dtype=np.float32) / SAMPLE_RATE
    hertz = _LOW.get(digit, 941), _HIGH.get(digit, 1477)
    sound = sum(np.sin(np.float32(2 * np.pi * each) * at) for each in hertz) / 2
    fade = np.minimum(1, np.minimum(at, at[::-1]) / _FADE_S)
    return np.asarray(sound * fade, np.float32)
