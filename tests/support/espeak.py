"""Speech of eSpeak NG, which reads known sentences aloud: ``main`` is a program, ``python -m tests.support.espeak WAV``,
JSON in and out. ``record`` runs it in a process of its own, because the library has only one voice at a time.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import wave
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.support.real_models import real_model

PAUSE_S = 0.3  # silence after each sentence, as long as the library's own between two sentences
_SYNCHRONOUS = 2  # AUDIO_OUTPUT_SYNCHRONOUS: the library plays nothing; it passes the samples on before it returns
_UTF8 = 1  # espeakCHARS_UTF8
Samples = np.ndarray[Any, Any]
_Callback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
)


class Spoken(NamedTuple):
    """The sentences in a recording, and the start and end of each one in seconds."""

    sentences: list[str]
    times: list[tuple[float, float]]

    @property
    def text(self) -> str:
        return " ".join(self.sentences)


def record(
    path: Path, said: Sequence[str | float], *, voice: str = "en-us", noise: int = 0
) -> Spoken:
    """Write a mono WAV file at 22,050 Hz with ``said``: sentences, and silences in seconds.

    ``noise``: standard deviation of white noise under the whole recording, of 32,767.
    """
    asked = {"folder": str(real_model("espeak-ng")), "voice": voice, "noise": noise, "said": said}
    command = [sys.executable, "-m", __name__, str(path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        command, input=json.dumps(asked), capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    times = [(start, end) for start, end in json.loads(done.stdout)]
    return Spoken([its for its in said if isinstance(its, str)], times)


def main() -> None:
    asked, times = json.load(sys.stdin), []
    rate, say = _opened(Path(asked["folder"]), asked["voice"])
    pieces, n_before = list[Samples](), 0
    for sentence_or_silence in asked["said"]:
        if isinstance(sentence_or_silence, str):
            samples = say(sentence_or_silence)
            times.append((n_before / rate, (n_before + len(samples)) / rate))
            samples = np.concatenate([samples, np.zeros(round(PAUSE_S * rate), np.int16)])
        else:
            samples = np.zeros(round(sentence_or_silence * rate), np.int16)
        pieces.append(samples)
        n_before += len(samples)
    noise = np.random.default_rng(0).normal(0, asked["noise"], n_before)
    sound = (np.concatenate(pieces) + noise).clip(-32768, 32767)
    with wave.open(sys.argv[1], "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes(sound.astype("<i2").tobytes())
    json.dump(times, sys.stdout)


class _Opened(NamedTuple):
    """The library's samples per second, and a function that returns the samples of a sentence."""

    rate: int
    say: Callable[[str], Samples]


def _opened(folder: Path, voice: str) -> _Opened:
    library = ctypes.CDLL(str(folder / "libespeak-ng.so"))
    rate = library.espeak_Initialize(_SYNCHRONOUS, 0, str(folder).encode(), 0)
    heard = list[Samples]()

    @_Callback
    def keep(samples: Any, n_samples: int, _events: Any) -> int:
        if samples and n_samples:
            heard.append(np.ctypeslib.as_array(samples, (n_samples,)).copy())
        return 0

    library.espeak_SetSynthCallback(keep)
    if rate <= 0 or library.espeak_SetVoiceByName(voice.encode()):
        raise SystemExit(f"espeak: {folder} has no voices, or not the voice {voice}")

    def say(sentence: str) -> Samples:
        heard.clear()
        text = sentence.encode()
        if library.espeak_Synth(text, len(text) + 1, 0, 0, 0, _UTF8, None, None):
            raise SystemExit(f"espeak: cannot say {sentence!r}")
        assert keep  # the library calls it, but does not keep it alive
        return np.concatenate(heard)

    return _Opened(rate, say)


if __name__ == "__main__":
    main()
