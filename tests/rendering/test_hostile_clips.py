"""Clips that are broken or mean harm: each is a MediaError in bounded time, nothing outside the media root is opened
and nothing is fetched."""

from __future__ import annotations

import base64
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from batchkit.errors import MediaError
from batchkit.rendering.media import load_media
from tests.support import clips
from tests.support.images import PNG, media_table

MKV = clips.video(clips.frames(40))
MP4 = clips.video(clips.frames(40), format="mp4", codec="libx264")
WAV = clips.sound(clips.tone(3))
FILM = clips.film(clips.frames(40), np.concatenate([clips.tone(1)] * 5))
FLAC = clips.sound(clips.tone(3), format="flac", codec="flac")
_LIMIT_S = 10  # seconds that the table allows
_MARK = b"\x44\x89"  # Matroska's Duration, behind which are its size and a number


def _wav(*, channels: int = 1, rate: int = 16000, bits: int = 16, said: int = 32000) -> bytes:
    """One second, with any header."""
    block = channels * bits // 8
    head = struct.pack("<HHIIHH", 1, channels, rate, rate * block % 2**32, block % 2**16, bits)
    body = b"fmt " + struct.pack("<I", len(head)) + head + b"data" + struct.pack("<I", said)
    return b"RIFF" + struct.pack("<I", len(body) + 4 + 32000) + b"WAVE" + body + b"\1\2" * 16000


def _lasting(seconds: float) -> bytes:
    """The video, whose header says another length."""
    place = MKV.index(_MARK) + len(_MARK)
    assert MKV[place] == 0x88  # a double, in milliseconds
    return MKV[: place + 1] + struct.pack(">d", seconds * 1000) + MKV[place + 9 :]


def _damaged(data: bytes) -> bytes:
    """Noise over the middle."""
    a, b = len(data) // 3, len(data) * 2 // 3
    return data[:a] + np.random.default_rng(0).bytes(b - a) + data[b:]


def _huge() -> bytes:
    return clips.video(np.zeros((2, 2048, 4096, 3), np.uint8))


HOSTILE: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "empty": ("video", lambda: b"", "it is empty"),
    "noise": (
        "video",
        lambda: b"\5" + np.random.default_rng(1).bytes(5000),
        "no clip that can be read",
    ),
    "text": ("audio", lambda: b"hello\n" * 100, "no clip that can be read"),
    "image": ("video", lambda: PNG, "no clip that can be read"),
    "MP4 cut short": ("video", lambda: MP4[: len(MP4) // 2], "broken or cut short"),
    "MP4 without its end": ("video", lambda: MP4[:-400], "broken or cut short"),
    "MKV cut short": ("video", lambda: MKV[: len(MKV) // 2], "5.0 s long, and"),
    "film cut short": ("audio", lambda: FILM[: len(FILM) // 2], "5.0 s long, and"),
    "MKV of a header": ("video", lambda: MKV[:200], "broken or cut short"),
    "MKV with noise": ("video", lambda: _damaged(MKV), ""),
    "MP4 with noise": ("video", lambda: _damaged(MP4), ""),
    "FLAC with noise": ("audio", lambda: _damaged(FLAC), ""),
    "says 1,000 s": ("video", lambda: _lasting(1000), "1000.0 s long, and 5.0 s"),
    "says a year": ("video", lambda: _lasting(3e7), "media.max_video_seconds is 3600"),
    "WAV cut short": ("audio", lambda: WAV[: len(WAV) // 2], "it is cut short"),
    "WAV of a header": ("audio", lambda: WAV[:44], "it is cut short"),
    "sample rate 1": ("audio", lambda: _wav(rate=1), "at 1 samples a second"),
    "sample rate 4e9": ("audio", lambda: _wav(rate=4_000_000_000), ""),
    "65,535 channels": ("audio", lambda: _wav(channels=65535), ""),
    "no channel": ("audio", lambda: _wav(channels=0), ""),
    "sound without video": ("video", lambda: WAV, "has no video"),
    "video without sound": ("audio", lambda: MKV, "has no audio"),
    "frames of 8 megapixels": ("video", _huge, "media.max_decode_bytes"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_clip_is_refused_in_words(case: str) -> None:
    kind, make, words = HOSTILE[case]
    data, began = make(), time.monotonic()
    media = media_table(max_decode_bytes=2**24)

    with pytest.raises(MediaError) as caught:
        load_media(kind, data, media)

    assert words in str(caught.value)
    assert str(caught.value).startswith(f"{kind} of {len(data)} bytes: ")
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)
    assert time.monotonic() - began < _LIMIT_S


PLAYLISTS = {
    "hls": "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{}\n#EXT-X-ENDLIST\n",
    "m3u": "#EXTM3U\n{}\n",
    "concat": "ffconcat version 1.0\nfile '{}'\n",
    "dash": '<?xml version="1.0"?><MPD><BaseURL>{}</BaseURL></MPD>',
    "sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\nc=IN IP4 127.0.0.1\nm=video 1 RTP/AVP 96\na=control:{}\n",
    "hls behind ID3": "ID3\3\0\0\0\0\0\0#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{}\n",
}


@pytest.mark.parametrize("kind", ["video", "audio"])
@pytest.mark.parametrize("playlist", PLAYLISTS)
def test_no_playlist_is_followed(playlist: str, kind: str, tmp_path: Path) -> None:
    """The clip that it names is a good one, and beside it."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "good.mp4").write_bytes(MP4)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        for name in (
            root / "good.mp4",
            f"file:{root / 'good.mp4'}",
            f"http://127.0.0.1:{server.getsockname()[1]}/x.mp4",
        ):
            (root / "list.mp4").write_text(PLAYLISTS[playlist].format(name))
            with pytest.raises(MediaError):
                load_media(kind, "list.mp4", media_table(root))
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.parametrize(
    "path", ["../out.mkv", "link.mkv", "/etc/passwd", "http://127.0.0.1/a.mkv"]
)
def test_nothing_outside_the_root_is_opened(path: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "out.mkv").write_bytes(MKV)
    (root / "link.mkv").symlink_to(tmp_path / "out.mkv")
    with pytest.raises(MediaError, match=r"outside media\.root|not on media\.allow_urls"):
        load_media("video", path, media_table(root))


def test_clips_over_the_limits_are_refused_before_they_are_decoded() -> None:
    for kind, data, limits, words in (
        (
            "video",
            MKV,
            {"max_video_seconds": 4},
            "is 5.0 s long or longer, media.max_video_seconds is 4",
        ),
        (
            "audio",
            WAV,
            {"max_audio_seconds": 2},
            "is 3.0 s long or longer, media.max_audio_seconds is 2",
        ),
        (
            "video",
            f"data:;base64,{base64.b64encode(MKV).decode()}",
            {"max_bytes": 1000},
            "media.max_bytes",
        ),
        ("video", MKV, {"max_decode_bytes": 10**5}, "32 frames of 96×64 pixels need"),
    ):
        with pytest.raises(MediaError) as caught:
            load_media(kind, data, media_table(**limits))
        assert words in str(caught.value)
