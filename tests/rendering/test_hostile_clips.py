"""Clips that mean harm: nothing outside the media root is opened, nothing is fetched, and what is over the limits is not
decoded."""

from __future__ import annotations

import base64
import socket
from pathlib import Path

import pytest

from batchkit.errors import MediaError
from batchkit.rendering.media import load_media
from tests.support import clips
from tests.support.images import media_table

MKV = clips.video(clips.frames(40))
MP4 = clips.video(clips.frames(40), format="mp4", codec="libx264")
WAV = clips.sound(clips.tone(3))
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


ENCODED = f"data:;base64,{base64.b64encode(MKV).decode()}"
OVER = [
    ("video", MKV, {"max_video_seconds": 4}, "is at least 5.0 s long, but media.max_video_seconds is 4"),
    ("audio", WAV, {"max_audio_seconds": 2}, "is at least 3.0 s long, but media.max_audio_seconds is 2"),
    ("video", ENCODED, {"max_bytes": 1000}, "media.max_bytes"),
    ("video", MKV, {"max_decode_bytes": 10**5}, "32 frames of 96×64 pixels need"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "data", "limits", "words"), OVER, ids=range(4))
def test_clips_over_the_limits_are_refused_before_they_are_decoded(
    kind: str, data: bytes | str, limits: dict[str, int], words: str
) -> None:
    with pytest.raises(MediaError) as caught:
        load_media(kind, data, media_table(**limits))
    assert words in str(caught.value)


def test_nothing_outside_the_root_is_opened(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "out.mkv").write_bytes(MKV)
    with pytest.raises(MediaError, match=r"outside media\.root"):
        load_media("video", "../out.mkv", media_table(tmp_path / "root"))
