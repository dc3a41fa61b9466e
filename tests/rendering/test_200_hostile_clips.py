"""A run over 200 clips that are broken or mean harm: each is its own row's failure, or heard as far as it goes, in bounded
time and memory, and no process is left."""

from __future__ import annotations

import io
import json
import struct
import threading
import time
import zipfile
from collections.abc import Iterator
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import psutil
import pytest

from tests.support import clips
from tests.support.images import PNG
from tests.support.model_runs import newest, write_job
from tests.support.own_process import begin

pytestmark = pytest.mark.slow

_MOST_BYTES = 2**31  # of the run and all its processes; each decoder may have 1.03 GiB
_MOST_S = 240


class Hostile(NamedTuple):
    """``words`` are in the message of its row's failure; None: it may be decoded as far as it goes."""

    name: str
    kind: str
    data: bytes
    words: str | None = None


@pytest.mark.release
def test_200_hostile_clips_fail_alone_in_bounded_time_and_memory(tmp_path: Path) -> None:
    hostile, rows = [clip for make in _CLASSES for clip in make()], []
    assert len({clip.name for clip in hostile}) == len(hostile) >= 200
    (tmp_path / "clips").mkdir()
    for n, clip in enumerate(hostile):
        (tmp_path / f"clips/{n}").write_bytes(clip.data)
        part = {"type": f"{clip.kind}_url", f"{clip.kind}_url": {"url": f"{n}"}}
        rows.append({"id": clip.name, "messages": [{"role": "user", "content": [part]}]})
    write_job(
        tmp_path,
        rows,
        input={"path": "rows.jsonl", "id": "id"},
        media={"root": "clips", "max_decode_bytes": 2**24},
        engine={"kind": "dry-run"},
        run={"check_rows": 0},
    )

    began, most, seen = time.monotonic(), [0], set[int]()
    with begin("run", "job.toml", cwd=tmp_path) as process:
        watch = threading.Thread(target=_watch, args=(process.pid, most, seen))
        watch.start()
        stdout, stderr = process.communicate(timeout=_MOST_S)
        watch.join()
    took_s = time.monotonic() - began

    assert process.returncode == 3, stderr[-2000:]
    records = newest(tmp_path)
    failed = {its["id"]: its["error"] for its in records if its["status"] == "failed"}
    said = {name: error["message"] for name, error in failed.items()}
    print(f"{len(failed)} of {len(records)} failed, {took_s:.0f} s, {most[0] / 2**20:,.0f} MiB")
    assert {error["kind"] for error in failed.values()} == {"media"}
    sure = [clip for clip in hostile if clip.words is not None]
    wrong = {clip.name: said.get(clip.name) for clip in sure if not _has(said, clip)}
    assert wrong == {}
    assert all(len(text) < 500 and "\n" not in text for text in said.values())
    assert most[0] < _MOST_BYTES
    assert json.loads(stdout)["total"] == len(hostile)
    assert [pid for pid in seen if psutil.pid_exists(pid)] == []


def _has(said: dict[str, str], clip: Hostile) -> bool:
    return clip.name in said and (clip.words or "") in said[clip.name]


def _watch(pid: int, most: list[int], seen: set[int]) -> None:
    """The most memory of the process and all below it, at a time."""
    while psutil.pid_exists(pid):
        total = 0
        try:
            main = psutil.Process(pid)
            if main.status() == psutil.STATUS_ZOMBIE:
                return
            for process in (main, *main.children(recursive=True)):
                seen.add(process.pid)
                total += process.memory_info().rss
        except psutil.Error:
            continue
        most[0] = max(most[0], total)
        time.sleep(0.02)


_CUT_SHORT = {
    "mkv": "header says 5.0 s",
    "film": "header says 5.0 s",
    "mp4": "is broken or truncated",
    "wav": "is truncated",
}


@cache
def _good() -> dict[str, tuple[str, bytes]]:
    frames, tone = clips.frames(40), clips.tone(5)
    stereo = np.stack([tone, tone[::-1]])
    return {
        "mkv": ("video", clips.video(frames)),
        "mp4": ("video", clips.video(frames, format="mp4", codec="libx264")),
        "avi": ("video", clips.video(frames, format="avi", codec="mpeg4")),
        "film": ("audio", clips.film(frames, tone)),
        "wav": ("audio", clips.sound(tone)),
        "flac": ("audio", clips.sound(stereo, format="flac", codec="flac")),
        "ogg": ("audio", clips.sound(stereo, format="ogg", codec="libopus")),
        "mp3": ("audio", clips.sound(tone, format="mp3", codec="libmp3lame")),
    }


def _cut_short() -> Iterator[Hostile]:
    for format, (kind, data) in _good().items():
        for share in (0.001, 0.02, 0.3, 0.6, 0.9):
            # Half a second may be missing, and other formats have no length that counts.
            words = _CUT_SHORT.get(format) if share < 0.9 else None
            if words is not None and share < 0.1:  # nothing but a part of the header
                words = ""
            yield Hostile(f"{format} of {share}", kind, data[: int(share * len(data))], words)


def _noise() -> Iterator[Hostile]:
    for format, (kind, data) in _good().items():
        for seed in range(6):
            random = np.random.default_rng(seed)
            at = int(random.integers(len(data)))
            noise = random.bytes(int(random.integers(1, len(data) // 2)))
            made = (data[:at] + noise + data[at + len(noise) :])[: len(data)]
            yield Hostile(f"{format} with noise {seed}", kind, made)


def _broken_heads() -> Iterator[Hostile]:
    for format, (kind, data) in _good().items():
        for seed in range(6):
            random, made = Random(seed), bytearray(data)
            for _ in range(8):
                made[random.randrange(4, 300)] = random.choice([0, 1, 127, 128, 255])
            yield Hostile(f"{format} with a broken head {seed}", kind, bytes(made))


def _wav(
    *, channels: int = 1, rate: int = 16000, bits: int = 16, said: int = 32000, tag: int = 1
) -> bytes:
    """One second, with any header."""
    block = channels * bits // 8
    head = struct.pack("<HHIIHH", tag, channels, rate, rate * block % 2**32, block % 2**16, bits)
    body = b"fmt " + struct.pack("<I", len(head)) + head + b"data" + struct.pack("<I", said)
    return b"RIFF" + struct.pack("<I", len(body) + 4 + 32000) + b"WAVE" + body + b"\1\2" * 16000


def _odd_wavs() -> Iterator[Hostile]:
    for channels in (0, 65, 1000, 65535):
        yield Hostile(f"{channels} channels", "audio", _wav(channels=channels), "")
    for rate in (0, 1, 7, 999, 10**6, 2**31, 4 * 10**9):
        words = f"at {rate} Hz; expected" if 0 < rate <= 10**6 else ""
        yield Hostile(f"{rate} samples a second", "audio", _wav(rate=rate), words)
    for bits in (0, 1, 3, 7, 63, 65535):
        yield Hostile(f"{bits} bits", "audio", _wav(bits=bits))
    for tag in (0, 2, 6, 0x55, 0x161, 0x2000, 0xFFFE, 0xFFFF):
        yield Hostile(f"codec {tag}", "audio", _wav(tag=tag))
    for said in (0, 1, 2**16, 2**31, 2**32 - 1):
        yield Hostile(f"{said} bytes", "audio", _wav(said=said))


def _wrong_lengths() -> Iterator[Hostile]:
    (_, mkv), mark = _good()["mkv"], b"\x44\x89"
    place = mkv.index(mark) + len(mark)
    for seconds in (-1e9, 0.0, 6.0, 1e3, 1e6, 1e18, float("inf"), float("nan")):
        data = mkv[: place + 1] + struct.pack(">d", seconds * 1000) + mkv[place + 9 :]
        words = None
        if 5.6 < seconds < 1e17:
            lies = f"header says {seconds:.1f} s, but 5.0 s"
            words = lies if seconds < 3600 else "max_video_seconds is 3600"
        yield Hostile(f"a video that says {seconds} s", "video", data, words)


def _bombs() -> Iterator[Hostile]:
    silence = np.zeros(3600 * 3 * clips.RATE, np.int16)
    silent = clips.sound(silence, format="flac", codec="flac")
    yield Hostile("three hours of silence", "audio", silent, "")
    large = clips.video(np.zeros((2, 2048, 4096, 3), np.uint8))
    yield Hostile("frames of 8 megapixels", "video", large, "media.max_decode_bytes")
    many = clips.video(np.zeros((4000, 16, 32, 3), np.uint8), rate=1)
    yield Hostile("an hour of video", "video", many, "")
    for size in (0, 30_000, 65_535):
        head = b"GIF89a" + struct.pack("<HHBBB", size, size, 0x80, 0, 0) + bytes(6)
        image = b"," + struct.pack("<HHHHB", 0, 0, size, size, 0) + b"\2\3\x84\x8f\x05\0;"
        yield Hostile(f"a GIF of {size} pixels a side", "video", head + image, "")


def _no_clips() -> Iterator[Hostile]:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        file.writestr("a.wav", _wav())
    things = {
        "nothing": b"",
        "zeros": bytes(100_000),
        "noise": b"\5" + np.random.default_rng(1).bytes(5000),
        "a text": b"hello\n" * 100,
        "a picture": PNG,
        "an archive": packed.getvalue(),
        "a page": b"<html><script>fetch('http://127.0.0.1:9')</script>",
        "a program": b"\x7fELF" + bytes(2000),
        "a PDF": b"%PDF-1.7\n" * 50,
    }
    for (name, data), kind in zip(things.items(), cycle(["audio", "video"]), strict=False):
        words = "is not a readable clip" if data else "it is empty"
        yield Hostile(name, kind, data, words)
    yield Hostile("sound without video", "video", _good()["wav"][1], "has no video")
    yield Hostile("video without sound", "audio", _good()["mkv"][1], "has no audio")


def _random() -> Iterator[Hostile]:
    """Noise behind the first bytes of each kind of file."""
    marks = [b"\0\0\0\x20ftypisom", b"\x1a\x45\xdf\xa3", b"OggS", b"fLaC", b"FORM\0\0\0\x10AIFF"]
    marks += [b"FLV\1", b"\0\0\1\xba", b"#!AMR\n", b"\xff\xf1", b"ID3\4", b"GIF89a"]
    marks += [b"\x30\x26\xb2\x75\x8e\x66\xcf\x11"]
    for seed, mark in enumerate(islice(cycle(marks), 20)):
        data = mark + np.random.default_rng(seed).bytes(20_000)
        yield Hostile(f"noise {seed}", ("audio", "video")[seed % 2], data)


_CLASSES = (
    *(_cut_short, _noise, _broken_heads, _odd_wavs),
    *(_wrong_lengths, _bombs, _no_clips, _random),
)
