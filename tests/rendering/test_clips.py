"""Sound and video: what ``load_media`` accepts, how it samples, and that its only exception is MediaError."""

from __future__ import annotations

import base64
import socket
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchkit.config.tables import MediaTable
from batchkit.errors import MediaError
from batchkit.rendering.media import load_media, load_still
from batchkit.types import Audio, Video
from tests.support import clips
from tests.support.images import media_table

FRAMES = clips.frames(20)
VIDEO = clips.video(FRAMES)
TONE = clips.tone(2)
WAV = clips.sound(TONE)


def video(source: Any, media: MediaTable | None = None) -> Video:
    found = load_media("video", source, media or media_table(num_frames=5))
    assert isinstance(found, Video)
    return found


def audio(source: Any, media: MediaTable | None = None) -> Audio:
    found = load_media("audio", source, media or media_table())
    assert isinstance(found, Audio)
    return found


def test_the_still_of_a_video_is_of_its_middle_and_small() -> None:
    still = np.asarray(load_still(VIDEO, 96, media_table()))
    near = [n for n in range(20) if (still == FRAMES[n]).all()]
    assert near
    assert 9 <= near[0] <= 10
    assert load_still(VIDEO, 48, media_table()).size == (48, 32)
    assert load_still(clips.video(FRAMES[:1]), 96, media_table()).size == (96, 64)
    with pytest.raises(MediaError, match="no video"):
        load_still(WAV, 96, media_table())


@pytest.mark.parametrize("n_frames", [1, 2, 5, 6, 31])
@pytest.mark.parametrize("wanted", [1, 5, 32])
def test_frames_are_taken_evenly_with_their_times(n_frames: int, wanted: int) -> None:
    made = clips.frames(n_frames)
    found = video(clips.video(made, rate=8), media_table(num_frames=wanted))

    picked = clips.chosen(n_frames, wanted)
    assert (found.frames == made[picked]).all()
    assert (found.indexes, found.total_frames, found.fps) == (picked, n_frames, 8.0)
    assert found.times_s == pytest.approx([n / 8 for n in picked])
    assert found.duration_s == pytest.approx(n_frames / 8)


def test_frames_by_seconds_follow_the_length() -> None:
    for n_frames, expected in ((1, 1), (8, 2), (24, 6)):
        found = video(clips.video(clips.frames(n_frames), rate=8), media_table(fps=2))
        assert len(found.frames) == expected


def test_frames_are_scaled_to_the_limit_of_images() -> None:
    assert video(VIDEO, media_table(num_frames=2, max_pixels=1536)).frames.shape == (2, 32, 48, 3)
    assert video(VIDEO, media_table(num_frames=2, factor=32)).frames.shape == (2, 64, 96, 3)


def test_a_clip_of_a_phone_is_upright() -> None:
    """Its matrix says: turn it to the right by 90°."""
    data = bytearray(clips.video(FRAMES, format="mp4", codec="libx264"))
    place = data.index(b"tkhd") + 4 + 40
    assert struct.unpack(">9i", data[place : place + 36])[:2] == (65536, 0)
    struct.pack_into(">5i", data, place, 0, 65536, 0, -65536, 0)

    found = video(bytes(data)).frames
    plain = video(clips.video(FRAMES, format="mp4", codec="libx264")).frames
    assert found.shape == (5, 96, 64, 3)
    assert (found == np.rot90(plain, -1, axes=(1, 2))).all()


def test_the_rate_of_a_clip_is_measured_if_its_header_lies() -> None:
    """A frame each half second, in a file that says 8 of them a second."""
    data = clips.video(FRAMES, shown_s=0.5)
    found = video(data)
    assert found.fps == pytest.approx(2)
    assert found.times_s == pytest.approx([n / 2 for n in clips.chosen(20, 5)])


@pytest.mark.parametrize(
    ("format", "codec"),
    [
        ("mp4", "libx264"),
        ("avi", "mpeg4"),
        ("webm", "libvpx-vp9"),
        ("mov", "mpeg4"),
        ("mpegts", "mpeg2video"),
    ],
)
def test_the_usual_files_are_read(format: str, codec: str) -> None:
    rate = 25 if codec == "mpeg2video" else 8
    found = video(clips.video(FRAMES, format=format, codec=codec, rate=rate))
    assert found.frames.shape == (5, 64, 96, 3)
    assert found.total_frames == 20
    assert np.abs(found.frames[2].astype(int) - FRAMES[9]).mean() < 20


@pytest.mark.parametrize(
    ("format", "codec"),
    [
        ("wav", "pcm_s16le"),
        ("flac", "flac"),
        ("mp3", "libmp3lame"),
        ("ogg", "libopus"),
        ("mp4", "aac"),
        ("adts", "aac"),
        ("aiff", "pcm_s16be"),
    ],
)
@pytest.mark.parametrize("rate", [16000, 48000])
def test_sound_is_mono_at_the_models_rate(format: str, codec: str, rate: int) -> None:
    both = np.stack([clips.tone(2, rate=rate), clips.tone(2, rate=rate)])
    found = audio(clips.sound(both, rate=rate, format=format, codec=codec))

    assert (found.sample_rate, found.samples.dtype) == (16000, np.float32)
    assert len(found.samples) / 16000 == pytest.approx(2, abs=0.2)  # AAC begins with silence
    loudest = np.abs(np.fft.rfft(found.samples)).argmax() * 16000 / len(found.samples)
    assert loudest == pytest.approx(440, abs=2)
    assert np.abs(found.samples).max() == pytest.approx(12000 / 32768, rel=0.1)


@pytest.mark.parametrize(
    ("format", "codec"),
    [
        ("wav", "pcm_s16le"),
        ("wav", "pcm_s24le"),
        ("wav", "pcm_f32le"),
        ("matroska", "pcm_f64le"),
        ("aiff", "pcm_s16be"),
        ("flac", "flac"),
    ],
)
def test_the_samples_of_a_plain_file_are_its_own(format: str, codec: str) -> None:
    left, right = clips.tone(2), clips.tone(2, hertz=300)

    one = audio(clips.sound(left, format=format, codec=codec))
    both = audio(clips.sound(np.stack([left, right]), format=format, codec=codec))

    assert (one.samples == left.astype(np.float32) / 32768).all()
    assert (both.samples == (left.astype(np.float32) + right) / 2 / 32768).all()


@pytest.mark.parametrize(("n_frames", "seconds"), [(8, 5), (80, 2)])
def test_the_sound_and_the_frames_of_a_film_may_differ_in_length(
    n_frames: int, seconds: int
) -> None:
    data = clips.film(clips.frames(n_frames), clips.tone(seconds))
    assert video(data).total_frames == n_frames
    assert len(audio(data).samples) == seconds * 16000


# Clips that mean harm: nothing is fetched, and what is over the limits is not decoded.

FORTY = clips.video(clips.frames(40))
THREE_S = clips.sound(clips.tone(3))
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
    (root / "good.mp4").write_bytes(clips.video(FRAMES, format="mp4", codec="libx264"))
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


ENCODED = f"data:;base64,{base64.b64encode(FORTY).decode()}"
OVER = [
    ("video", FORTY, {"max_video_seconds": 4}, "is at least 5.0 s long, but media.max_video_seconds is 4"),
    ("audio", THREE_S, {"max_audio_seconds": 2}, "is at least 3.0 s long, but media.max_audio_seconds is 2"),
    ("video", ENCODED, {"max_bytes": 1000}, "media.max_bytes"),
    ("video", FORTY, {"max_decode_bytes": 10**5}, "32 frames of 96×64 pixels need"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "data", "limits", "words"), OVER, ids=range(4))
def test_clips_over_the_limits_are_refused_before_they_are_decoded(
    kind: str, data: bytes | str, limits: dict[str, int], words: str
) -> None:
    with pytest.raises(MediaError) as caught:
        load_media(kind, data, media_table(**limits))
    assert words in str(caught.value)
