"""Decoding of image files to RGB within the limits of ``[media]``, in little memory.

Large images are never copied whole: the decoded image is converted to RGB or gray tile by tile, each tile is averaged
down by an integer factor, and only that small image is resampled. JPEGs are decoded at a half, a quarter or an eighth
of their size if that is enough.
"""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from math import ceil, floor, isqrt, sqrt
from typing import IO, NamedTuple

from PIL import Image
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile, jpeg_factory
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from batchkit.config.tables import MediaTable
from batchkit.errors import MediaError
from batchkit.sources.rowhash import loaded, orientation_of

# Used instead of Image.open, which supports 40 more formats and refuses images over Image.MAX_IMAGE_PIXELS, a global
# variable of the user's process that batchkit must not change. media.max_decode_bytes is the limit instead.
_OPENERS: dict[re.Pattern[bytes], Callable[[IO[bytes]], ImageFile]] = {
    re.compile(rb"\x89PNG\r\n\x1a\n"): PngImageFile,
    re.compile(rb"\xff\xd8\xff"): jpeg_factory,
    re.compile(rb"RIFF....WEBP", re.DOTALL): WebPImageFile,
    re.compile(rb"GIF8[79]a"): GifImageFile,
    re.compile(rb"BM"): BmpImageFile,
    re.compile(rb"II[*+]\0|MM\0[*+]"): TiffImageFile,
}
_READABLE = "PNG, JPEG, WebP, GIF, BMP or TIFF"

_NEW_SUBFILE_TYPE = 254  # TIFF 6.0, section 8: bit 0 for a smaller copy, bit 2 for a mask
_OF_ANOTHER = 0b101

# Number of copies of the pixels in memory at the decoder's peak (measured at 60 MP). WebP: two canvases, the bytes and
# the image. TIFF: the image, and either a strip (at most the whole image) or the image turned upright. GIF and
# run-length BMP: the image and a second frame.
_COPIES = {"WEBP": 4, "TIFF": 2, "GIF": 2, "BMP": 2}
_STORED_BYTES = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16L": 2, "I;16B": 2, "I;16N": 2}  # else 4
_ROW_POINTER_BYTES = 8

# The image is averaged down to at least this multiple of the target size, and then resampled (as with the parameter
# reducing_gap of Image.resize). Measured on a rendered table, from 32 to 1.6 MP: 2.5 times as fast as resampling alone,
# PSNR 41 dB. With 3, that image would not be averaged at all.
_REDUCING_GAP = 2
_TILE_PIXELS_A_SIDE = 1024

# Images that need more bytes than this are decoded one at a time, because otherwise each render thread could hold
# media.max_decode_bytes at the same time.
LARGE_BYTES = 128 * 2**20
one_large_image = threading.Lock()

_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
LARGEST_ASPECT = 200


def decode(data: bytes, name: str, media: MediaTable) -> Image.Image:
    """Return the image in the file ``data``, converted as ``load_image`` describes. ``name``: for messages.

    Raises:
        MediaError: not a readable image, or too large to decode.
    """
    if not data:
        raise MediaError(f"{name}: the file is empty; give {_READABLE}")
    with _translated(name, f"its {len(data)} bytes begin with {data[:16]!r}"):
        image = _open(data, name)
        if isinstance(image, TiffImageFile) and _has_pages(data):
            raise MediaError(
                f"{name}: is a TIFF of several pages; save each page as a separate image"
            )
        full = Size(*image.size)
        target = target_of(full, name, media)
        drafted = image.draft(None, (_REDUCING_GAP * target.width, _REDUCING_GAP * target.height))
        extent = drafted[1][2:] if drafted else full
        need_bytes = _need_bytes(image, full, target, data)
        if need_bytes > media.max_decode_bytes:
            raise MediaError(
                f"{name}: {full.width}×{full.height} pixels ({image.format}, {image.mode}) need"
                f" {need_bytes} bytes to decode, but media.max_decode_bytes is"
                f" {media.max_decode_bytes}; raise it or store the image smaller"
            )
        with one_large_image if need_bytes > LARGE_BYTES else nullcontext():
            image.load()
            return _upright(_scaled(image, extent, target, name), orientation_of(image))


def fit(image: Image.Image, name: str, media: MediaTable) -> Image.Image:
    """Return a copy of an ``image`` in memory, converted as ``load_image`` describes. ``name``: for messages.

    Raises:
        MediaError: the image has no pixels, or can't be converted to RGB.
    """
    if not image.width or not image.height:
        raise MediaError(f"{name}: has no pixels; give an image of at least 1×1")
    with _translated(name, f"an image of mode {image.mode}"):
        orientation = loaded(image)
        full = Size(*image.size)
        target = target_of(full, name, media)
        return _upright(_scaled(image, full, target, name), orientation)


def target_of(full: Size, name: str, media: MediaTable) -> Size:
    """Return the size to which an image of size ``full`` is scaled for the model. Raises MediaError if ``media.factor``
    is set and the aspect ratio is over ``LARGEST_ASPECT``."""
    limits = {"min_pixels": media.min_pixels, "max_pixels": media.max_pixels}
    if media.factor is None:
        return target_size(*full, **limits)
    size = smart_size(*full, factor=media.factor, **limits)
    for wide, high in (full, size):  # rounding to the factor may stretch it
        if max(wide, high) > LARGEST_ASPECT * min(wide, high):
            raise MediaError(
                f"{name}: {wide}×{high} pixels: one side is over {LARGEST_ASPECT} times the other,"
                " which Qwen-VL's image processor refuses; cut the image into pieces"
            )
    return size


@contextmanager
def _translated(name: str, found: str) -> Iterator[None]:
    """Turn every exception inside the block into a MediaError, because Pillow's readers may raise any type."""
    try:
        yield
    except MediaError:
        raise
    except Exception as error:
        raise MediaError(
            f"{name}: is broken, cut short, too large or of an unsupported kind"
            f" ({type(error).__name__}: {error}; {found}); save it again as PNG or JPEG, or smaller"
        ) from error


def _open(data: bytes, name: str) -> ImageFile:
    """Return the image with its header read and no pixel decoded."""
    for signature, opener in _OPENERS.items():
        if signature.match(data):
            return opener(io.BytesIO(data))
    raise MediaError(
        f"{name}: is not an image that can be read: its {len(data)} bytes begin with"
        f" {data[:16]!r}; give {_READABLE}"
    )


def _has_pages(data: bytes) -> bool:
    """Return whether a TIFF has several pages. A second image that is only a smaller copy or a mask of the first one is
    not a page."""
    second = TiffImageFile(io.BytesIO(data))
    try:
        second.seek(1)
    except Exception:  # there is no second image, or it is broken; only the first one is used
        return False
    return not second.tag_v2.get(_NEW_SUBFILE_TYPE, 0) & _OF_ANOTHER


def _need_bytes(image: ImageFile, full: Size, target: Size, data: bytes) -> int:
    """Return the peak memory, in bytes, to decode ``image`` and average it down. The result is not included."""
    drafted = Size(*image.size)
    decoded = _stored_bytes(image.mode, drafted) * _COPIES.get(image.format or "", 1)
    if isinstance(image, JpegImageFile) and data.count(b"\xff\xda") > 1:
        # The JPEG has several scans (usually it is progressive). libjpeg then keeps the coefficients of up to three
        # channels in full size, 2 bytes each, even if it decodes at a reduced size. The scan of a thumbnail is counted,
        # too.
        decoded += 6 * full.width * full.height
    factor = _factor(drafted, target)
    reduced = Size(-(-drafted.width // factor.width), -(-drafted.height // factor.height))
    return decoded + _stored_bytes("RGB", reduced)


def _stored_bytes(mode: str, size: Size) -> int:
    """Return the number of bytes that Pillow needs for an image: rows padded to 4 bytes, and one pointer per row."""
    row = -(-size.width * _STORED_BYTES.get(mode, 4) // 4) * 4
    return size.height * (row + _ROW_POINTER_BYTES)


def _factor(size: Size, target: Size) -> Size:
    """Return the integer factors by which an image is averaged down before it is resampled to ``target``."""
    return Size(
        max(1, size.width // (_REDUCING_GAP * target.width)),
        max(1, size.height // (_REDUCING_GAP * target.height)),
    )


def _scaled(
    image: Image.Image, extent: tuple[float, float], target: Size, name: str
) -> Image.Image:
    """Return ``image`` as a new RGB image of size ``target``.

    ``extent``: the width and height of ``image`` that have content. A JPEG that was decoded at a reduced size may fill
    its last column and row only partly.
    """
    factor = _factor(Size(*image.size), target)
    flat = _flattened(image, factor, name)
    box = (0.0, 0.0, extent[0] / factor.width, extent[1] / factor.height)
    # With nothing to resize, Image.resize returns a copy, so the result is always new.
    scaled = flat.resize(target, Image.Resampling.LANCZOS, box=box)
    rgb = scaled if scaled.mode == "RGB" else scaled.convert("RGB")
    rgb.info.clear()
    return rgb


def _flattened(image: Image.Image, factor: Size, name: str) -> Image.Image:
    """Return ``image`` as L (gray) or RGB without transparency, averaged down by ``factor``. May return ``image``
    itself."""
    if image.mode in ("L", "RGB") and not image.has_transparency_data:
        return image.reduce(factor) if factor != (1, 1) else image  # reduce(1) would copy
    if image.mode in ("I", "F"):
        raise MediaError(
            f"{name}: has 32-bit gray, whose value range is unknown; save it with 16 or 8 bits"
        )
    flat: Image.Image | None = None
    tile_width, tile_height = (max(f, _TILE_PIXELS_A_SIDE // f * f) for f in factor)
    for top in range(0, image.height, tile_height):
        for left in range(0, image.width, tile_width):
            right, bottom = (
                min(left + tile_width, image.width),
                min(top + tile_height, image.height),
            )
            tile = _flat_tile(image.crop((left, top, right, bottom)))
            if flat is None:
                size = (-(-image.width // factor.width), -(-image.height // factor.height))
                flat = Image.new(tile.mode, size)
            flat.paste(tile.reduce(factor), (left // factor.width, top // factor.height))
    assert flat is not None  # there is at least one pixel
    return flat


def _flat_tile(tile: Image.Image) -> Image.Image:
    """Return a part of an image in Pillow's mode L (gray) or RGB, with transparent pixels over white."""
    if tile.mode.startswith("I;16"):
        return tile.convert("F").point(lambda value: value * (255 / 65535) + 0.5).convert("L")
    if tile.has_transparency_data:
        colors = tile if tile.mode == "RGBA" else tile.convert("RGBA")
        if colors.getchannel("A").getextrema() == (255, 255):  # opaque, like most screenshots
            return colors.convert("RGB")
        white = Image.new("RGB", tile.size, "white")
        white.paste(colors, mask=colors)
        return white
    return tile.convert("L" if tile.mode in ("1", "L") else "RGB")


def _upright(image: Image.Image, orientation: int | None) -> Image.Image:
    turn = _UPRIGHT.get(orientation or 1)
    return image if turn is None else image.transpose(turn)


class Size(NamedTuple):
    """A size in pixels."""

    width: int
    height: int


def target_size(width: int, height: int, *, min_pixels: int, max_pixels: int) -> Size:
    """Return a size with the aspect ratio of ``width`` × ``height`` whose number of pixels is within the limits.

    A size within the limits is returned unchanged. Otherwise both sides are scaled by √(limit / (width · height)),
    rounded down when shrinking and up when growing. Integers avoid float errors. Both sides must be at least 1.

    The result never has more than ``max_pixels``. If this limit conflicts with the aspect ratio (a side would be
    shorter than one pixel) or with ``min_pixels``, the longer side is shortened.
    """
    pixels = width * height
    if pixels > max_pixels:
        wide = max(1, isqrt(max_pixels * width // height))
        high = max(1, isqrt(max_pixels * height // width))
    elif pixels < min_pixels:
        wide = _root_up(min_pixels * width, height)
        high = _root_up(min_pixels * height, width)
    else:
        return Size(width, height)
    if wide >= high:
        return Size(min(wide, max_pixels // high), high)
    return Size(wide, min(high, max_pixels // wide))


def smart_size(width: int, height: int, *, factor: int, min_pixels: int, max_pixels: int) -> Size:
    """Return the size that transformers' Qwen-VL processors choose (``smart_resize``): both sides are multiples of
    ``factor``.

    Within the limits, sides are rounded to the nearest multiple. Outside of the limits, they are scaled by √(limit /
    pixels), and rounded down to a multiple when shrinking, up when growing. The processor does not resize an image of
    this size again. The processor refuses an image whose longer side is more than ``LARGEST_ASPECT`` times the shorter
    one.
    """
    wide, high = (round(side / factor) * factor for side in (width, height))
    if wide * high > max_pixels:
        beta = sqrt(height * width / max_pixels)
        wide, high = (max(factor, floor(s / beta / factor) * factor) for s in (width, height))
    elif wide * high < min_pixels:
        beta = sqrt(min_pixels / (height * width))
        wide, high = (ceil(s * beta / factor) * factor for s in (width, height))
    return Size(max(factor, wide), max(factor, high))


def _root_up(numerator: int, denominator: int) -> int:
    """Return √(numerator / denominator), rounded up."""
    return isqrt(-(-numerator // denominator) - 1) + 1
