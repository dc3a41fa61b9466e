"""The handler that decodes sound and video with PyAV and its bundled FFmpeg.

The demuxer is chosen by the first bytes of a file. FFmpeg must not guess it, because it would then open the addresses
in a playlist.
"""

from __future__ import annotations

import io
import marshal
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any, Literal

import av
import numpy as np

from batchkit.isolation.child import ChildRefusal, answer_all, limit_memory

_DEMUXERS = {
    re.compile(rb"....(ftyp|moov|mdat|wide|free|skip)", re.DOTALL): "mov",
    re.compile(rb"\x1a\x45\xdf\xa3"): "matroska",
    re.compile(rb"RIFF....AVI ", re.DOTALL): "avi",
    re.compile(rb"(RIFF|RF64|RIFX)....WAVE", re.DOTALL): "wav",
    re.compile(rb"OggS"): "ogg",
    re.compile(rb"fLaC"): "flac",
    re.compile(rb"FORM....AIF[FC]", re.DOTALL): "aiff",
    re.compile(rb"FLV\x01"): "flv",
    re.compile(rb"GIF8[79]a"): "gif",
    re.compile(rb"\x30\x26\xb2\x75\x8e\x66\xcf\x11"): "asf",
    re.compile(rb"#!AMR"): "amr",
    re.compile(rb"\x00\x00\x01\xba"): "mpeg",
    re.compile(rb"G.{187}G", re.DOTALL): "mpegts",
    re.compile(rb"\xff[\xf0\xf1\xf8\xf9]"): "aac",
    re.compile(rb"ID3|\xff[\xe2-\xe7\xf2-\xf7\xfa-\xfd]"): "mp3",
}
_READABLE = "MP4, MOV, MKV, WebM, AVI, WAV, MP3, M4A, FLAC, OGG, AIFF or another plain clip"
# FFmpeg estimates their length from the bit rate.
_GUESSED = ("aac", "amr", "mp3", "mpeg", "mpegts")
_NICE = 10  # decoding ahead must not slow down the threads that feed the engine
_SHORT_S, _SHORT_SHARE = 0.5, 0.05  # how much shorter than its header says a complete clip may be
_SAMPLE_RATES = range(1000, 768_001)
_MOST_CHANNELS = 64
_SIZE_ORDER: dict[bytes, Literal["little", "big"]] = {b"RIFF": "little", b"FORM": "big"}
_UNKNOWN_SIZE = 2**32 - 2**16  # programs that write to a pipe put the largest number there
_MOST_FRAMES_A_SECOND = 1000
_MOST_FROM_KEY_FRAME = 300  # frames decoded to reach the middle of a video
_RATE = 25.0  # frames per second if the clip gives no rate
# Packets of a WAV in which FFmpeg looks for DTS: its default of 32 takes longer than decoding.
_OPTIONS = {"max_probe_packets": "4"}
_AT_ONCE = 2**16  # samples per channel that one call resamples
_FULL_SCALE = {"s16": 2**15, "s16p": 2**15, "s32": 2**31, "s32p": 2**31, "flt": 1, "fltp": 1}


def main(connection: Connection) -> None:
    os.nice(_NICE)
    answer_all(connection, _answer)


def _answer(question: bytes) -> Any:
    what, place, arguments, memory_bytes = marshal.loads(question)
    limit_memory(memory_bytes)
    with open(place, "rb") as file:
        start = file.read(1024)
        demuxer = next((name for mark, name in _DEMUXERS.items() if mark.match(start)), None)
        if demuxer is None:
            found = f"it begins with {start[:16]!r}" if start else "it is empty"
            raise ChildRefusal("unreadable", f"is not a readable clip: {found}; give {_READABLE}")
        _check_bytes(start, file.seek(0, io.SEEK_END))
        file.seek(0)
        try:
            with av.open(file, format=demuxer, options=_OPTIONS) as clip:
                return _ANSWERS[what](clip, *arguments)
        except av.error.FFmpegError as error:
            raise ChildRefusal(
                "unreadable", f"is broken or truncated ({error.strerror}); save it again"
            ) from error


def _check_bytes(start: bytes, n_bytes: int) -> None:
    """Refuse a WAV, AVI or AIFF file that is shorter than its header says, because FFmpeg would accept it as
    complete."""
    if (order := _SIZE_ORDER.get(start[:4])) is None:
        return
    said = int.from_bytes(start[4:8], order) + 8
    if n_bytes < said < _UNKNOWN_SIZE:
        raise ChildRefusal(
            "unreadable",
            f"is truncated: its header says {said:,} bytes, but the file has {n_bytes:,}; save it again",
        )


def _audio(clip: Any, sample_rate: int, max_seconds: float) -> bytes:
    """Decode the sound, mixed to one channel, and return its float32 samples at ``sample_rate`` Hz."""
    stream = _stream(clip, "audio")
    rate, channels = stream.rate or 0, stream.codec_context.channels
    if rate not in _SAMPLE_RATES or not 0 < channels <= _MOST_CHANNELS:
        raise ChildRefusal(
            "unreadable",
            f"has {channels} channels at {rate} Hz; expected 1 to {_MOST_CHANNELS}"
            f" channels at {_SAMPLE_RATES[0]:,} to {_SAMPLE_RATES[-1]:,} Hz",
        )
    _check_length(clip, stream, max_seconds)
    samples, n_samples = list[Any](), 0
    for made in _resampled(_gathered(clip.decode(stream)), sample_rate):
        samples.append(_mono(made))
        n_samples += made.samples
        if n_samples > max_seconds * sample_rate:
            raise _too_long(n_samples / sample_rate, "audio", max_seconds)
    if not n_samples:
        raise ChildRefusal("unreadable", "has no sound that can be decoded; save it again")
    _check_whole(clip, stream, n_samples / sample_rate)
    return bytes(np.concatenate(samples).astype("<f4").data)


def _gathered(frames: Iterator[Any]) -> Iterator[Any]:
    """Merge small frames into larger ones, because function calls for many small frames would take longer than
    resampling."""
    fifo, kind = av.AudioFifo(), None
    for frame in frames:
        found = frame.format.name, frame.layout.name, frame.sample_rate
        if found != kind:
            if fifo.samples:
                yield fifo.read()
            fifo, kind = av.AudioFifo(), found
        frame.pts = None  # PyAV would refuse a gap in the clip's timestamps
        fifo.write(frame)
        if fifo.samples >= _AT_ONCE:
            yield fifo.read()
    if fifo.samples:
        yield fifo.read()


def _resampled(frames: Iterator[Any], sample_rate: int) -> Iterator[Any]:
    """Resample frames to ``sample_rate``, in a number format that ``_mono`` reads.

    Frames that have this rate are not resampled: FFmpeg would only convert the number format, which takes longer than
    decoding.
    """
    resampler = None
    for frame in frames:
        if (
            resampler is None
            and frame.sample_rate == sample_rate
            and frame.format.name in _FULL_SCALE
        ):
            yield frame
        else:
            resampler = resampler or av.AudioResampler(format="fltp", rate=sample_rate)
            yield from resampler.resample(frame)
    if resampler is not None:
        yield from resampler.resample(None)


def _mono(frame: Any) -> Any:
    """Return the mean of the channels, from -1 to 1. FFmpeg's "mono" layout adds the channels, which can be louder."""
    samples = frame.to_ndarray()
    if not frame.format.is_planar:
        samples = samples.reshape(-1, frame.layout.nb_channels).T
    samples = samples.astype(np.float32) / np.float32(_FULL_SCALE[frame.format.name])
    return samples[0] if len(samples) == 1 else samples.mean(axis=0)


def _video(clip: Any, max_seconds: float) -> tuple[int, int, int, float]:
    """Return the upright width and height, the number of frames, and the length in seconds.

    Only the first frame is decoded. The number and the length come from the packets, which is faster.
    """
    stream = _stream(clip, "video")
    _check_length(clip, stream, max_seconds)
    first, times = None, list[float]()
    for packet in clip.demux(stream):
        if first is None:
            first = next(iter(packet.decode()), None)
        if packet.size:
            times.append(_time(packet.pts, packet.time_base, times, stream))
        if len(times) > _MOST_FRAMES_A_SECOND * max_seconds:
            raise _too_long(_seconds_of(times, stream), "video", max_seconds)
    if first is None:
        raise ChildRefusal("unreadable", "has no frame that can be decoded; save it again")
    wide, high = first.width, first.height
    upright = (high, wide) if _quarter_turns(first) % 2 else (wide, high)
    return *upright, len(times), _seconds_of(times, stream)


def _frames(
    clip: Any, width: int, height: int, chosen: Sequence[int], max_seconds: float
) -> tuple[int, float, float, list[float], bytes]:
    """Return the ``chosen`` frames as upright RGB pixels of ``width`` × ``height``, after four facts about the video.

    The facts are the number of all frames, the frame rate, the length in seconds, and the times of the chosen frames.
    """
    stream = _stream(clip, "video")
    _check_length(clip, stream, max_seconds)
    times, pixels = list[float](), list[bytes]()
    for frame in clip.decode(stream):
        times.append(_time(frame.pts, frame.time_base, times, stream))
        if times[-1] - times[0] > max_seconds:
            raise _too_long(times[-1] - times[0], "video", max_seconds)
        if len(times) - 1 in chosen:
            pixels.append(_rgb(frame, width, height))
    seconds = _seconds_of(times, stream)
    _check_whole(clip, stream, seconds)
    kept = [times[n] - times[0] for n in chosen if n < len(times)]
    declared, measured = _rate(stream), len(times) / seconds
    rate = declared if math.isclose(declared, measured, rel_tol=0.01) else measured
    return len(times), rate, seconds, kept, b"".join(pixels)


def _still(clip: Any, side: int) -> tuple[int, int, bytes]:
    """Return width, height and upright RGB pixels of the middle frame, scaled so that no side is longer than ``side``.

    If key frames are rare, an earlier frame is returned.
    """
    stream, frame = _stream(clip, "video"), None
    middle_s = (_stated_s(clip, stream) or 0.0) / 2
    if middle_s:
        clip.seek(int(middle_s * av.time_base))
    for frame in islice(clip.decode(stream), _MOST_FROM_KEY_FRAME):
        if frame.time is None or frame.time >= middle_s:
            break
    if frame is None:
        raise ChildRefusal("unreadable", "has no frame that can be decoded; save it again")
    smaller = min(1.0, side / max(frame.width, frame.height))
    wide, high = (max(1, round(smaller * it)) for it in (frame.width, frame.height))
    if _quarter_turns(frame) % 2:
        wide, high = high, wide
    return wide, high, _rgb(frame, wide, high)


def _rgb(frame: Any, width: int, height: int) -> bytes:
    turns = _quarter_turns(frame)
    wide, high = (height, width) if turns % 2 else (width, height)
    pixels = frame.to_ndarray(format="rgb24", width=wide, height=high)
    return bytes(np.ascontiguousarray(np.rot90(pixels, turns)).data)


def _quarter_turns(frame: Any) -> int:
    """Return how often the frame must be rotated by 90° to the left (0 to 3) to be upright."""
    return int(round(frame.rotation / 90) % 4)


def _stream(clip: Any, kind: str) -> Any:
    found = getattr(clip.streams, kind)
    if not found:
        raise ChildRefusal("unreadable", f"has no {kind}; give a clip that has {kind}")
    found[0].codec_context.thread_count = 1  # other processes decode clips at the same time
    return found[0]


def _check_length(clip: Any, stream: Any, max_seconds: float) -> None:
    said = _stated_s(clip, stream)
    if said is not None and said > max_seconds:
        raise _too_long(said, stream.type, max_seconds)


def _too_long(seconds: float, kind: str, max_seconds: float) -> ChildRefusal:
    return ChildRefusal(
        "unreadable",
        f"is at least {seconds:,.1f} s long, but media.max_{kind}_seconds is {max_seconds:g}; raise it or cut"
        " the clip",
    )


def _stated_s(clip: Any, stream: Any) -> float | None:
    """Return the length in seconds that the file's header states, or None if it states none."""
    if clip.format.name in _GUESSED:
        return None
    if stream.duration is not None:
        return float(stream.duration * stream.time_base)
    return None if clip.duration is None else clip.duration / av.time_base


def _check_whole(clip: Any, stream: Any, seconds: float) -> None:
    """Refuse a file with less sound or video than its header states, because FFmpeg decodes a cut-off file without
    error."""
    said = _stated_s(clip, stream)
    if said is None or not _is_short(seconds, said):
        return
    if stream.duration is not None or _is_short(_last_s(clip), said):
        raise ChildRefusal(
            "unreadable",
            f"is truncated or has a wrong header: the header says {said:.1f} s, but {seconds:.1f} s could be decoded;"
            " save it again",
        )


def _is_short(seconds: float, said: float) -> bool:
    return said - seconds > max(_SHORT_S, _SHORT_SHARE * said)


def _last_s(clip: Any) -> float:
    """Return the end of the last packet of any stream; the header's length may belong to another stream."""
    clip.seek(0)
    packets = (packet for packet in clip.demux() if packet.pts is not None)
    ends = (float((it.pts + (it.duration or 0)) * it.time_base) for it in packets)
    return max(ends, default=0.0)


def _time(pts: int | None, time_base: Any, before: Sequence[float], stream: Any) -> float:
    return len(before) / _rate(stream) if pts is None else float(pts * time_base)


def _seconds_of(times: Sequence[float], stream: Any) -> float:
    """Return the length in seconds of frames shown at ``times``. The last frame is assumed to have the average
    duration."""
    shown = max(times, default=0.0) - min(times, default=0.0)
    return shown * len(times) / (len(times) - 1) if shown > 0 else 1 / _rate(stream)


def _rate(stream: Any) -> float:
    return float(stream.average_rate or stream.guessed_rate or 0) or _RATE


_ANSWERS: dict[str, Callable[..., Any]] = {
    "audio": _audio,
    "video": _video,
    "frames": _frames,
    "still": _still,
}
