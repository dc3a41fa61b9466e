"""Two hundred clips that are broken or mean harm, by class; the same each time."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from itertools import cycle, islice
from random import Random
from typing import NamedTuple

import numpy as np

from tests.support import clips
from tests.support.images import PNG


class Hostile(NamedTuple):
    """``must_fail``: no part of it can be taken for a clip; others may be decoded as far as they go."""

    name: str
    kind: str
    data: bytes
    must_fail: bool


def hostile_clips() -> list[Hostile]:
    found = [one for make in _CLASSES for one in make()]
    assert len({one.name for one in found}) == len(found)
    return found


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
            # Half a second may be missing, and these formats have no length that counts.
            is_known = share < 0.9 and format not in ("mp3", "ogg", "flac", "avi")
            yield Hostile(f"{format} of {share}", kind, data[: int(share * len(data))], is_known)


def _noise() -> Iterator[Hostile]:
    for format, (kind, data) in _good().items():
        for seed in range(5):
            random = np.random.default_rng(seed)
            at = int(random.integers(len(data)))
            noise = random.bytes(int(random.integers(1, len(data) // 2)))
            made = (data[:at] + noise + data[at + len(noise) :])[: len(data)]
            yield Hostile(f"{format} with noise {seed}", kind, made, False)


def _broken_heads() -> Iterator[Hostile]:
    for format, (kind, data) in _good().items():
        for seed in range(5):
            random, made = Random(seed), bytearray(data)
            for _ in range(8):
                made[random.randrange(4, 300)] = random.choice([0, 1, 127, 128, 255])
            yield Hostile(f"{format} with a broken head {seed}", kind, bytes(made), False)


def wav(
    *, channels: int = 1, rate: int = 16000, bits: int = 16, said: int = 32000, tag: int = 1
) -> bytes:
    """One second, with any header."""
    block = channels * bits // 8
    head = struct.pack("<HHIIHH", tag, channels, rate, rate * block % 2**32, block % 2**16, bits)
    body = b"fmt " + struct.pack("<I", len(head)) + head + b"data" + struct.pack("<I", said)
    return b"RIFF" + struct.pack("<I", len(body) + 4 + 32000) + b"WAVE" + body + b"\1\2" * 16000


def _odd_wavs() -> Iterator[Hostile]:
    for channels in (0, 65, 1000, 65535):
        yield Hostile(f"{channels} channels", "audio", wav(channels=channels), True)
    for rate in (0, 1, 7, 999, 10**6, 2**31, 4 * 10**9):
        yield Hostile(f"{rate} samples a second", "audio", wav(rate=rate), True)
    for bits in (0, 1, 3, 7, 63, 65535):
        yield Hostile(f"{bits} bits", "audio", wav(bits=bits), False)
    for tag in (0, 2, 6, 0x55, 0x161, 0x2000, 0xFFFE, 0xFFFF):
        yield Hostile(f"codec {tag}", "audio", wav(tag=tag), False)
    for said in (0, 1, 2**16, 2**31, 2**32 - 1):
        yield Hostile(f"{said} bytes", "audio", wav(said=said), False)


def _wrong_lengths() -> Iterator[Hostile]:
    (_, mkv), mark = _good()["mkv"], b"\x44\x89"
    place = mkv.index(mark) + len(mark)
    for seconds in (-1e9, 0.0, 6.0, 1e3, 1e6, 1e18, float("inf"), float("nan")):
        data = mkv[: place + 1] + struct.pack(">d", seconds * 1000) + mkv[place + 9 :]
        yield Hostile(f"a video that says {seconds} s", "video", data, 5.6 < seconds < 1e17)


def _bombs() -> Iterator[Hostile]:
    silence = np.zeros(3600 * 3 * clips.RATE, np.int16)
    yield Hostile(
        "three hours of silence", "audio", clips.sound(silence, format="flac", codec="flac"), True
    )
    yield Hostile(
        "frames of 8 megapixels", "video", clips.video(np.zeros((2, 2048, 4096, 3), np.uint8)), True
    )
    many = clips.video(np.zeros((4000, 16, 32, 3), np.uint8), rate=1)
    yield Hostile("an hour of video", "video", many, True)
    for size in (0, 30_000, 65_535):
        head = b"GIF89a" + struct.pack("<HHBBB", size, size, 0x80, 0, 0) + bytes(6)
        image = b"," + struct.pack("<HHHHB", 0, 0, size, size, 0) + b"\2\3\x84\x8f\x05\0;"
        yield Hostile(f"a GIF of {size} pixels a side", "video", head + image, True)


_PLAYLISTS = {
    "hls": "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{}\n#EXT-X-ENDLIST\n",
    "concat": "ffconcat version 1.0\nfile '{}'\n",
    "dash": '<?xml version="1.0"?><MPD><BaseURL>{}</BaseURL></MPD>',
    "sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\nc=IN IP4 127.0.0.1\nm=video 1 RTP/AVP 96\na=control:{}\n",
    "hls behind ID3": "ID3\3\0\0\0\0\0\0#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{}\n",
}


def _lists() -> Iterator[Hostile]:
    for list_name, text in _PLAYLISTS.items():
        for kind, source in (("audio", "/etc/passwd"), ("video", "http://127.0.0.1:9/x.mp4")):
            data = text.format(source).encode()
            yield Hostile(f"{list_name} of {source}", kind, data, True)


def _no_clips() -> Iterator[Hostile]:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        file.writestr("a.wav", wav())
    things = {
        "nothing": b"",
        "zeros": bytes(100_000),
        "a picture": PNG,
        "an archive": packed.getvalue(),
        "a page": b"<html><script>fetch('http://127.0.0.1:9')</script>",
        "a program": b"\x7fELF" + bytes(2000),
        "a PDF": b"%PDF-1.7\n" * 50,
    }
    for (name, data), kind in zip(things.items(), cycle(["audio", "video"]), strict=False):
        yield Hostile(name, kind, data, True)


def _random() -> Iterator[Hostile]:
    """Noise behind the first bytes of each kind of file."""
    marks = [
        b"\0\0\0\x20ftypisom",
        b"\x1a\x45\xdf\xa3",
        b"OggS",
        b"fLaC",
        b"FORM\0\0\0\x10AIFF",
        b"FLV\1",
    ]
    marks += [
        b"\0\0\1\xba",
        b"#!AMR\n",
        b"\xff\xf1",
        b"ID3\4",
        b"\x30\x26\xb2\x75\x8e\x66\xcf\x11",
        b"GIF89a",
    ]
    for seed, mark in enumerate(islice(cycle(marks), 20)):
        data = mark + np.random.default_rng(seed).bytes(20_000)
        yield Hostile(f"noise {seed}", ("audio", "video")[seed % 2], data, False)


_CLASSES: tuple[Callable[[], Iterator[Hostile]], ...] = (
    *(_cut_short, _noise, _broken_heads, _odd_wavs, _wrong_lengths),
    *(_bombs, _lists, _no_clips, _random),
)
