"""What becomes of an image's pixels: colours, transparency, orientation and size."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin, TiffImagePlugin

from batchkit.config.tables import MediaTable
from batchkit.rendering.media import load_image
from batchkit.rendering.media.pixels import target_size
from tests.support.images import JPEG, PNG, RED, WHITE, encoded, gradient, media_table, refused
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow


def near(pixel: Any, expected: tuple[int, int, int], by: int = 4) -> bool:
    return all(abs(a - b) <= by for a, b in zip(pixel, expected, strict=True))


# What the pixels become


@pytest.mark.parametrize(
    ("format", "mode"),
    [
        *[("PNG", mode) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")],
        *[("JPEG", mode) for mode in ("L", "RGB", "CMYK", "YCbCr")],
        *[("WEBP", mode) for mode in ("RGB", "RGBA")],
        *[("GIF", mode) for mode in ("1", "L", "P")],
        *[("BMP", mode) for mode in ("1", "L", "P", "RGB")],
        *[("TIFF", mode) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16")],
    ],
)
@pytest.mark.parametrize("max_pixels", [10**6, 1000, 12], ids=["kept", "resampled", "averaged"])
def test_every_mode_becomes_the_same_gradient(format: str, mode: str, max_pixels: int) -> None:
    image = gradient("L", (256, 256))
    values = image.convert("I").point(lambda v: v * 257) if mode == "I;16" else image
    data = encoded(values.convert(mode), format)
    result = load_image(data, media_table(max_pixels=max_pixels))
    assert result.mode == "RGB"
    assert result.info == {}
    if mode == "1":  # dithered: right on average only
        result = result.resize((3, 3), Image.Resampling.BOX)
    expected = image.convert("RGB").resize(result.size, Image.Resampling.BOX)
    for y in range(result.height):
        for x in (0, result.width - 1):
            pixel: Any = expected.getpixel((x, y))
            assert near(result.getpixel((x, y)), pixel, by=24), (x, y)


@pytest.mark.parametrize("max_pixels", [10**6, 16], ids=["kept", "averaged"])
@pytest.mark.parametrize("kind", ["RGBA", "LA", "P", "RGB key", "L key", "GIF", "WEBP"])
def test_transparency_becomes_white(kind: str, max_pixels: int) -> None:
    clear_red = Image.new("RGBA", (64, 64), (255, 0, 0, 0))
    clear_red.paste((255, 0, 0, 255), (0, 0, 32, 64))
    left: tuple[int, int, int] = RED
    match kind:
        case "RGBA":
            data = encoded(clear_red, "PNG")
        case "LA":
            data, left = encoded(clear_red.convert("LA"), "PNG"), (76, 76, 76)
        case "P" | "GIF":
            image = Image.new("P", (64, 64), 1)
            image.putpalette([255, 0, 0, 0, 0, 255])
            image.paste(0, (0, 0, 32, 64))
            data = encoded(image, "PNG" if kind == "P" else "GIF", transparency=1)
        case "RGB key":
            image = Image.new("RGB", (64, 64), (0, 0, 255))
            image.paste(RED, (0, 0, 32, 64))
            data = encoded(image, "PNG", transparency=(0, 0, 255))
        case "L key":
            image = Image.new("L", (64, 64), 9)
            image.paste(70, (0, 0, 32, 64))
            data, left = encoded(image, "PNG", transparency=9), (70, 70, 70)
        case _:
            data = encoded(clear_red, "WEBP", lossless=True)
    result = load_image(data, media_table(max_pixels=max_pixels))
    assert near(result.getpixel((0, 0)), left)
    assert near(result.getpixel((result.width - 1, 0)), WHITE)


def test_half_transparent_is_mixed_with_white_and_not_with_its_hidden_color() -> None:
    half = Image.new("RGBA", (8, 8), (0, 0, 0, 128))
    assert near(load_image(half, media_table()).getpixel((0, 0)), (127, 127, 127))
    # Clear black pixels beside red ones must not darken the average.
    stripes = Image.new("RGBA", (64, 64), (0, 0, 0, 0))
    for x in range(0, 64, 2):
        stripes.paste((255, 0, 0, 255), (x, 0, x + 1, 64))
    averaged = load_image(stripes, media_table(max_pixels=16))
    assert near(averaged.getpixel((1, 1)), (255, 127, 127), 6)


def test_palette_images_are_averaged_by_color_and_not_by_index() -> None:
    image = Image.new("P", (64, 64), 0)
    image.putpalette([255, 0, 0, *[0, 255, 0] * 199, 0, 0, 255])
    for x in range(0, 64, 2):
        image.paste(200, (x, 0, x + 1, 64))
    result = load_image(encoded(image, "PNG"), media_table(max_pixels=16))
    assert near(result.getpixel((2, 2)), (127, 0, 127), 8)


def test_deep_gray_is_scaled_and_not_clipped() -> None:
    deep = Image.new("I;16", (3, 1))
    for x, value in enumerate((0, 32896, 65535)):
        deep.putpixel((x, 0), value)
    for format in ("PNG", "TIFF"):
        result = load_image(encoded(deep, format), media_table())
        assert [result.getpixel((x, 0)) for x in range(3)] == [(v, v, v) for v in (0, 128, 255)]


@pytest.mark.parametrize("max_pixels", [10**6, 500], ids=["kept", "scaled"])
@pytest.mark.parametrize("format", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int, format: str, max_pixels: int) -> None:
    upright = Image.new("RGB", (160, 80), "white")
    upright.paste((200, 0, 0), (0, 0, 80, 40))  # red at the upper left
    upright.paste((0, 0, 200), (0, 40, 80, 80))  # blue at the lower left
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = upright if orientation == 1 else upright.transpose(UNDO[orientation - 2])
    image = load_image(encoded(stored, format, exif=exif), media_table(max_pixels=max_pixels))
    assert image.width > image.height
    assert near(image.getpixel((image.width // 4, image.height // 4)), (200, 0, 0), 30)
    assert near(image.getpixel((image.width // 4, image.height * 3 // 4)), (0, 0, 200), 30)


TURN = Image.Transpose
UNDO = [TURN.FLIP_LEFT_RIGHT, TURN.ROTATE_180, TURN.FLIP_TOP_BOTTOM, TURN.TRANSPOSE]
UNDO += [TURN.ROTATE_90, TURN.TRANSVERSE, TURN.ROTATE_270]


def test_broken_exif_does_not_cost_the_image() -> None:
    data = encoded(gradient(), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert load_image(data, media_table()).size == (64, 48)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_frame_is_taken(format: str) -> None:
    first, second = (Image.new("RGB", (32, 32), color) for color in ("red", "blue"))
    options = {"lossless": True} if format == "WEBP" else {}
    data = encoded(first, format, save_all=True, append_images=[second] * 3, **options)
    assert near(load_image(data, media_table()).getpixel((5, 5)), RED)


def tiff(*subfile_types: int) -> bytes:
    """A red image and, for each of ``subfile_types``, a blue one of that type."""
    kinds = [TiffImagePlugin.ImageFileDirectory_v2() for _ in subfile_types]
    others = [Image.new("RGB", (32, 32), "blue") for _ in subfile_types]
    for kind, other, subfile_type in zip(kinds, others, subfile_types, strict=True):
        kind[254] = subfile_type
        other.encoderinfo = {"tiffinfo": kind}
    return encoded(Image.new("RGB", (32, 32), "red"), "TIFF", save_all=True, append_images=others)


@pytest.mark.parametrize(
    ("subfile_types", "are_pages"),
    [
        *(([0], True), ([2], True), ([2, 2], True)),
        *(([], False), ([1], False), ([1, 1], False), ([4], False), ([5], False)),
    ],
)
def test_a_tiff_of_several_pages_is_refused(subfile_types: list[int], are_pages: bool) -> None:
    """A scan: only its first page would be read. Smaller copies and masks are no pages."""
    if are_pages:
        assert "is a TIFF of several pages" in refused(tiff(*subfile_types), media_table())
    else:
        assert near(load_image(tiff(*subfile_types), media_table()).getpixel((5, 5)), RED)


# Sizes


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((640, 480), (640, 480)),
        ((3000, 2000), (1551, 1034)),
        ((5436, 42906), (451, 3559)),
        ((100, 50), (634, 317)),
        ((1, 10**9), (1, 1605632)),
        ((10**9, 1), (1605632, 1)),
        ((2, 10**9), (1, 1605632)),
        ((1, 1), (448, 448)),
    ],
)
def test_target_size_of(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert target_size(*size, min_pixels=200704, max_pixels=1605632) == expected


def test_image_becomes_the_size_that_the_model_takes() -> None:
    media = MediaTable(factor=32, min_pixels=200704, max_pixels=1605632)
    assert load_image(Image.new("RGB", (3518, 2252)), media).size == (1568, 992)
    narrow = "pixels: one side is over 200 times"
    assert f"2010×10 {narrow}" in refused(Image.new("RGB", (2010, 10)), media)
    media = MediaTable(factor=32, max_pixels=1_200_000)
    assert f"64×15424 {narrow}" in refused(Image.new("RGB", (84, 16721)), media)


side = st.integers(1, 10**9)


@given(side, side, st.integers(1, 10**8), st.integers(0, 10**8))
def test_target_size_never_passes_max_pixels_and_keeps_the_aspect(
    width: int, height: int, max_pixels: int, min_pixels: int
) -> None:
    min_pixels = min(min_pixels, max_pixels)
    new = target_size(width, height, min_pixels=min_pixels, max_pixels=max_pixels)
    assert min(new) >= 1
    assert new.width * new.height <= max_pixels
    turned = target_size(height, width, min_pixels=min_pixels, max_pixels=max_pixels)
    assert turned == new[::-1] or width == height
    if width * height > max_pixels and min(new) > 1:  # one pixel off, at most, on either side
        assert (new.width + 1) * height > new.height * width
        assert (new.height + 1) * width > new.width * height


@pytest.mark.parametrize("format", ["PNG", "JPEG"])
@pytest.mark.parametrize("size", [(1, 20000), (20000, 1), (3, 9999), (9999, 3), (1, 1), (1, 2)])
@pytest.mark.parametrize("limits", [(0, 1605632), (0, 1), (0, 7), (200704, 1605632), (5000, 5000)])
def test_extreme_aspects_load(format: str, size: tuple[int, int], limits: tuple[int, int]) -> None:
    media = media_table(min_pixels=limits[0], max_pixels=limits[1])
    for mode in ("RGB", "L", "CMYK" if format == "JPEG" else "P"):
        data = encoded(Image.new(mode, size), format)
        image = load_image(data, media)
        assert image.size == target_size(*size, min_pixels=limits[0], max_pixels=limits[1])


@pytest.mark.parametrize("mode", ["RGB", "P", "RGBA", "L"])
def test_averaging_first_is_close_to_resampling_at_once(mode: str) -> None:
    source = Image.effect_mandelbrot((1501, 1999), (-2, -1.5, 1, 1.5), 100).convert("RGB")
    image = source.quantize(64) if mode == "P" else source.convert(mode)
    for format in ("PNG", "JPEG") if mode in ("RGB", "L") else ("PNG",):
        result = load_image(encoded(image, format), media_table(max_pixels=40_000))
        fair = image.convert("RGB").resize(result.size, Image.Resampling.LANCZOS)
        pairs = zip(result.tobytes(), fair.tobytes(), strict=True)
        assert sum(abs(a - b) for a, b in pairs) / len(fair.tobytes()) < 3


# Memory


def test_pillows_bomb_limit_is_neither_in_the_way_nor_moved(monkeypatch: Any) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_image(PNG, media_table()).size == (64, 48)
        assert load_image(JPEG, media_table()).size == (64, 48)
    assert Image.MAX_IMAGE_PIXELS == 100


def test_max_decode_bytes_is_compared_before_decoding() -> None:
    data = encoded(Image.new("RGB", (1000, 1000)), "PNG")
    message = refused(data, media_table(max_decode_bytes=3_000_000))
    assert "1000×1000 pixels (PNG, RGB)" in message
    assert "media.max_decode_bytes is 3000000; raise it" in message
    # A draft of the JPEG fits, but not the coefficients that a progressive one keeps.
    media = media_table(max_decode_bytes=2_000_000, max_pixels=10_000)
    assert load_image(encoded(Image.new("RGB", (1000, 1000)), "JPEG"), media).size == (100, 100)
    progressive = encoded(Image.new("RGB", (1000, 1000)), "JPEG", progressive=True, subsampling=0)
    assert "max_decode_bytes" in refused(progressive, media)


HUGE = """
import json, resource, sys, time
from batchkit.config.tables import MediaTable
from batchkit.rendering.media import load_image

def peak_kib():  # of this process; ru_maxrss is inherited from the parent through fork
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1])

media = MediaTable(root=sys.argv[1])
load_image("small.png", media)
before, began = peak_kib(), time.perf_counter()
image = load_image("huge.png", media)
seconds = time.perf_counter() - began
used = (peak_kib() - before) * 1024
cap = media.max_decode_bytes + 2 * media.max_bytes + 64 * 2**20
print(json.dumps({"size": image.size, "used": used, "cap": cap, "s": seconds,
                  "colors": [image.getpixel((x, image.height // 2)) for x in (5, 440)]}))
"""


def write_huge_png(path: Path, row: bytes) -> None:
    """5436 × 42906 pixels with an alpha channel, row by row."""
    packer = zlib.compressobj(1)
    body = b"".join(packer.compress(b"\0" + row) for _ in range(42906)) + packer.flush()
    with open(path, "wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        header = struct.pack(">IIBBBBB", 5436, 42906, 8, 6, 0, 0, 0)
        for kind, data in ((b"IHDR", header), (b"IDAT", body), (b"IEND", b"")):
            PngImagePlugin.putchunk(file, kind, data)


@pytest.mark.release
def test_233_megapixels_load_within_the_stated_memory(tmp_path: Path) -> None:
    write_huge_png(tmp_path / "huge.png", b"\xc8\0\0\xff" * 2718 + bytes(4) * 2718)
    gradient().save(tmp_path / "small.png")
    command = [sys.executable, "-W", "error", "-c", HUGE, str(tmp_path)]
    found = json.loads(
        subprocess.check_output(command, env={**os.environ, "PYTHONPATH": str(ROOT)})
    )
    print(found)
    assert found["size"] == [451, 3559]
    assert found["used"] < found["cap"]
    assert found["colors"] == [[200, 0, 0], [255, 255, 255]]


def test_many_threads_load_at_once(tmp_path: Path) -> None:
    for number in range(8):
        Image.new("RGB", (600, 400), (number * 30, 0, 0)).save(tmp_path / f"{number}.png")
    open_files = len(list(Path("/proc/self/fd").iterdir()))
    media = media_table(tmp_path, max_pixels=10_000)
    with ThreadPoolExecutor(8) as pool:
        names = [f"{number % 8}.png" for number in range(160)]
        images = list(pool.map(lambda name: load_image(name, media), names))
    for number, image in enumerate(images):
        assert image.getpixel((9, 9)) == (number % 8 * 30, 0, 0)
    assert len(list(Path("/proc/self/fd").iterdir())) == open_files
