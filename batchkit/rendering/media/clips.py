"""From the bytes of a clip to samples of sound or frames of video, decoded in a process of its own."""

from __future__ import annotations

from contextlib import nullcontext

from PIL import Image

from batchkit.config.tables import MediaTable
from batchkit.errors import MediaError
from batchkit.isolation.files import CLIP_READER
from batchkit.rendering.media.pixels import LARGE_BYTES, Size, one_large_image, target_of
from batchkit.rendering.media.source import asking
from batchkit.types import Audio, Video


def decode_audio(data: bytes, name: str, media: MediaTable) -> Audio:
    """The first sound of the clip in ``data``: mono, ``media.audio_sample_rate`` samples a second.

    Raises:
        MediaError: it is broken, cut short, or longer than ``media.max_audio_seconds``.
    """
    import numpy as np

    rate, most_s = media.audio_sample_rate, media.max_audio_seconds
    with asking(CLIP_READER, data, name, media) as asked:
        samples = np.frombuffer(bytearray(asked("audio", rate, most_s)), dtype=np.float32)
    return Audio(samples, rate)


def decode_video(data: bytes, name: str, media: MediaTable) -> Video:
    """Frames of the first video of the clip in ``data``, evenly from first to last, within ``media``'s limits for images.

    Raises:
        MediaError: it is broken, cut short, longer than ``media.max_video_seconds``, or its frames need
            more than ``media.max_decode_bytes``.
    """
    import numpy as np

    most_s = media.max_video_seconds
    with asking(CLIP_READER, data, name, media) as asked:
        wide, high, total, seconds = asked("video", most_s)
        size = target_of(Size(wide, high), name, media)
        found = 0
        while found != total:  # the header's number, or that of the packets, may be wrong
            total = found or total
            chosen = _evenly(total, seconds, media)
            need_bytes = _need_bytes(Size(wide, high), size, len(chosen), name, media)
            with one_large_image if need_bytes > LARGE_BYTES else nullcontext():
                answer = asked("frames", *size, chosen, most_s, seconds=seconds)
            found, fps, seconds, times, pixels = answer
    frames = np.frombuffer(bytearray(pixels), dtype=np.uint8).reshape(
        -1, size.height, size.width, 3
    )
    return Video(frames, fps, seconds, total, chosen, times)


def decode_still(data: bytes, name: str, side: int, media: MediaTable) -> Image.Image:
    """A frame near the middle of the first video of the clip in ``data``; no side of it is longer than ``side``.

    Raises:
        MediaError: none can be decoded.
    """
    with asking(CLIP_READER, data, name, media) as asked:
        wide, high, pixels = asked("still", side)
    return Image.frombytes("RGB", (wide, high), pixels)


def _evenly(total: int, seconds: float, media: MediaTable) -> list[int]:
    """Indexes from the first frame to the last, as vLLM's own loader picks them."""
    import numpy as np

    wanted = media.video_frames
    if media.video_fps is not None:
        wanted = max(1, round(seconds * media.video_fps))
    return [int(n) for n in np.linspace(0, total - 1, min(wanted, total))]


def _need_bytes(full: Size, size: Size, n_frames: int, name: str, media: MediaTable) -> int:
    """Two copies of the frames, and a decoded one."""
    need_bytes = 2 * 3 * n_frames * size.width * size.height + 4 * full.width * full.height
    if need_bytes > media.max_decode_bytes:
        raise MediaError(
            f"{name}: {n_frames} frames of {size.width}×{size.height} pixels need {need_bytes} bytes to"
            f" decode, media.max_decode_bytes is {media.max_decode_bytes}; raise it, or lower"
            " media.video_frames or media.max_pixels"
        )
    return need_bytes
