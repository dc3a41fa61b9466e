"""Clips whose frames and samples are known exactly, since their codecs lose nothing."""

from __future__ import annotations

import io
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

RATE = 16000


def frames(n: int, *, seed: int = 0, size: tuple[int, int] = (96, 64)) -> Any:
    """A bar that moves over a background: RGB, [n, height, width, 3]."""
    wide, high = size
    made = np.empty((n, high, wide, 3), np.uint8)
    made[:] = np.random.default_rng(seed).integers(0, 255, 3)
    for number, frame in enumerate(made):
        left = (number * 7 + seed * 11) % (wide - 16)
        frame[:, left : left + 16] = [number * 8 % 256, 255 - number * 5 % 256, seed * 40 % 256]
    return made


def video(
    made: Any,
    *,
    rate: int = 8,
    format: str = "matroska",
    codec: str = "ffv1",
    shown_s: float | None = None,
) -> bytes:
    """``shown_s``: what a frame is shown for, if not for as long as ``rate`` says."""
    colors = {"ffv1": "bgr0", "libx264rgb": "rgb24"}.get(codec, "yuv420p")
    file = io.BytesIO()
    with av.open(file, "w", format=format) as clip:
        stream: Any = clip.add_stream(codec, rate=rate)
        stream.height, stream.width, stream.pix_fmt = made.shape[1], made.shape[2], colors
        if codec == "libx264rgb":
            stream.options = {"crf": "0"}
        for number, pixels in enumerate(made):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if shown_s is not None:
                frame.pts, frame.time_base = round(number * shown_s * 1000), Fraction(1, 1000)
            clip.mux(stream.encode(frame))
        clip.mux(stream.encode())
    return file.getvalue()


def film(made: Any, samples: Any, *, rate: int = 8) -> bytes:
    """Frames and sound, which need not be of one length."""
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as clip:
        shown: Any = clip.add_stream("ffv1", rate=rate)
        shown.height, shown.width, shown.pix_fmt = made.shape[1], made.shape[2], "bgr0"
        heard: Any = clip.add_stream("pcm_s16le", rate=RATE, layout="mono")
        for pixels in made:
            clip.mux(shown.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        clip.mux(shown.encode())
        frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
        frame.sample_rate = RATE
        for part in av.AudioResampler("s16", "mono", RATE, 1600).resample(frame):
            clip.mux(heard.encode(part))
        clip.mux(heard.encode())
    return file.getvalue()


def tone(seconds: float, *, hertz: float = 440, rate: int = RATE) -> Any:
    """Samples of 16 bits."""
    at = np.arange(int(seconds * rate)) / rate
    return (np.sin(2 * np.pi * hertz * at) * 12000).astype(np.int16)


def sound(
    samples: Any, *, rate: int = RATE, format: str = "wav", codec: str = "pcm_s16le"
) -> bytes:
    """``samples``: [n] or [channels, n]."""
    layout = "mono" if samples.ndim == 1 else "stereo"
    file = io.BytesIO()
    with av.open(file, "w", format=format) as clip:
        stream: Any = clip.add_stream(codec, rate=rate, layout=layout)
        interleaved = np.atleast_2d(samples).T.reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(
            np.ascontiguousarray(interleaved), format="s16", layout=layout
        )
        frame.sample_rate = rate
        for made in av.AudioResampler(stream.format, layout, rate, stream.frame_size).resample(
            frame
        ):
            clip.mux(stream.encode(made))
        clip.mux(stream.encode())
    return file.getvalue()


def chosen(n_frames: int, wanted: int) -> list[int]:
    """As vLLM's own loader picks them."""
    return [int(n) for n in np.linspace(0, n_frames - 1, min(wanted, n_frames))]


def write(folder: Path, name: str, data: bytes) -> str:
    (folder / name).write_bytes(data)
    return name
