"""Decoding of PDF pages, sound and video in a separate process, because a broken file may hang or crash the library
that decodes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from PIL import Image

from batchkit.config.tables import MediaTable
from batchkit.errors import MediaError
from batchkit.isolation.files import (
    CLIP_READER,
    PDF_READER,
    FileProcessError,
    FileReader,
    MemoryLimitError,
    UnreadableFileError,
    placed,
)
from batchkit.rendering.media.pixels import LARGE_BYTES, Size, one_large_image, target_of
from batchkit.types import Audio, Video

_POINTS_PER_INCH = 72
_SPARE_BYTES = 2**30  # memory for a reader's library and its buffers


def page_image(data: bytes, page: int | None, name: str, media: MediaTable) -> Image.Image:
    """Return one page of the PDF ``data`` as an image, at ``media.pdf_dpi`` and within the limits of ``media``.

    ``page``: number of the page, from 1; None if the PDF has only one page.

    Raises:
        MediaError: the PDF is broken, needs a password, lacks the page, or has several pages while ``page`` is None; or
            the pictures on the page need more than ``media.max_decode_bytes``.
    """
    with _asking(PDF_READER, data, name, media) as asked:
        if page is None and (n_pages := asked("pages")) > 1:
            raise MediaError(
                f"{name}: is a PDF of {n_pages:,} pages; select one, as in a.pdf#page=1 (with"
                ' input.format = "pdf", each page is a row, and {{ image }} names it)'
            )
        wide, high, need_bytes = asked("size", page or 1)
        if need_bytes > media.max_decode_bytes:
            raise MediaError(
                f"{name}: the pictures of the page need {need_bytes} bytes to decode,"
                f" but media.max_decode_bytes is {media.max_decode_bytes}; raise it, or store the pictures smaller"
            )
        scale = media.pdf_dpi / _POINTS_PER_INCH
        full = Size(max(1, round(wide * scale)), max(1, round(high * scale)))
        size = target_of(full, name, media)
        return Image.frombytes("RGB", size, asked("image", page or 1, *size))


def decode_audio(data: bytes, name: str, media: MediaTable) -> Audio:
    """Return the first sound track in ``data``: mono, ``media.audio_sample_rate`` samples per second.

    Raises:
        MediaError: the file is broken, cut short, or longer than ``media.max_audio_seconds``.
    """
    import numpy as np

    rate, most_s = media.audio_sample_rate, media.max_audio_seconds
    with _asking(CLIP_READER, data, name, media) as asked:
        samples = np.frombuffer(bytearray(asked("audio", rate, most_s)), dtype=np.float32)
    return Audio(samples, rate)


def decode_video(data: bytes, name: str, media: MediaTable) -> Video:
    """Return evenly spaced frames of the first video track in ``data``, within ``media``'s limits for images.

    Raises:
        MediaError: the file is broken, cut short or longer than ``media.max_video_seconds``, or decoding its frames
            needs more than ``media.max_decode_bytes``.
    """
    import numpy as np

    most_s = media.max_video_seconds
    with _asking(CLIP_READER, data, name, media) as asked:
        wide, high, total, seconds = asked("video", most_s)
        size = target_of(Size(wide, high), name, media)
        found = 0
        while found != total:  # the first number, from the header or the packet count, may be wrong
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
    """Return a frame near the middle of the first video track in ``data``, with no side longer than ``side``.

    Raises:
        MediaError: no frame can be decoded.
    """
    with _asking(CLIP_READER, data, name, media) as asked:
        wide, high, pixels = asked("still", side)
    return Image.frombytes("RGB", (wide, high), pixels)


@contextmanager
def _asking(
    reader: FileReader, data: bytes, name: str, media: MediaTable
) -> Iterator[Callable[..., Any]]:
    """Yield a function that asks the process ``reader`` about the file with the content ``data``.

    ``name``: the file's name for messages.

    Raises:
        MediaError: the file is broken, or a package that is needed to read it is not installed.
    """
    if (missing := reader.missing) is not None:
        raise MediaError(f"{name}: {missing}")
    try:
        with placed(data) as place:
            yield partial(reader.ask, place, 2 * media.max_decode_bytes + _SPARE_BYTES)
    except MemoryLimitError as error:
        raise MediaError(
            f"{name}: {error}; raise media.max_decode_bytes (now {media.max_decode_bytes}), or use a smaller file"
        ) from error
    except UnreadableFileError as error:
        raise MediaError(f"{name}: {error}") from error
    except FileProcessError as error:
        raise MediaError(f"{name}: can't be decoded: {error}") from error


def _evenly(total: int, seconds: float, media: MediaTable) -> list[int]:
    """Return the indexes of evenly spaced frames, from the first to the last frame, as vLLM's own loader chooses
    them."""
    import numpy as np

    wanted = media.num_frames
    if media.fps is not None:
        wanted = max(1, round(seconds * media.fps))
    return [int(n) for n in np.linspace(0, total - 1, min(wanted, total))]


def _need_bytes(full: Size, size: Size, n_frames: int, name: str, media: MediaTable) -> int:
    """Return the memory that decoding needs, in bytes: two copies of ``n_frames`` at ``size``, and one frame at
    ``full`` size. Raises MediaError if this is more than ``media.max_decode_bytes``."""
    need_bytes = 2 * 3 * n_frames * size.width * size.height + 4 * full.width * full.height
    if need_bytes > media.max_decode_bytes:
        raise MediaError(
            f"{name}: {n_frames} frames of {size.width}×{size.height} pixels need {need_bytes} bytes to"
            f" decode, but media.max_decode_bytes is {media.max_decode_bytes}; raise it, or lower"
            " media.num_frames or media.max_pixels"
        )
    return need_bytes
