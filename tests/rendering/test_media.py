"""Images: what load_image accepts, how it scales, and that its only exception is MediaError."""

from __future__ import annotations

import base64
import gc
import io
import json
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from batchkit.config.tables import MediaTable
from batchkit.errors import MediaError
from batchkit.rendering.media import SharedImages, load_image, load_text, target_size
from batchkit.rendering.media.download import fetch
from batchkit.rendering.media.size import LARGEST_ASPECT, smart_size
from tests.support.paths import ROOT

RED, WHITE = (255, 0, 0), (255, 255, 255)


def media_table(root: Path | None = None, **keys: Any) -> MediaTable:
    return MediaTable(root=str(root or "."), **keys)


def encoded(image: Image.Image, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def gradient(mode: str = "RGB", size: tuple[int, int] = (64, 48)) -> Image.Image:
    return Image.linear_gradient("L").resize(size).convert(mode)


def refused(source: Any, media: MediaTable) -> str:
    with pytest.raises(MediaError) as caught:
        load_image(source, media)
    return str(caught.value)


def near(pixel: Any, expected: tuple[int, int, int], by: int = 4) -> bool:
    return all(abs(a - b) <= by for a, b in zip(pixel, expected, strict=True))


# Where images come from


def test_every_kind_of_source_gives_the_same_image(tmp_path: Path) -> None:
    data = encoded(gradient(), "PNG")
    path = tmp_path / "charts" / "a b.png"
    path.parent.mkdir()
    path.write_bytes(data)
    text = base64.b64encode(data).decode()
    media = media_table(tmp_path)
    for source in (
        "charts/a b.png",
        str(path),
        Path("charts/a b.png"),
        f"file://{tmp_path}/charts/a%20b.png",
        f"file://localhost{tmp_path}/charts/a%20b.png",
        f"data:image/png;base64,{text}",
        f"DATA:;charset=x;base64,{text.replace('=', '%3D')}",
        data,
        bytearray(data),
        memoryview(data),
        {"bytes": data, "path": None},
        {"bytes": data, "path": "/elsewhere/x.png"},
        {"bytes": None, "path": "charts/a b.png"},
        Image.open(path),
        gradient(),
    ):
        image = load_image(source, media)
        assert type(image) is Image.Image
        assert (image.mode, image.size) == ("RGB", (64, 48))
        assert image.tobytes() == gradient().tobytes()


def test_an_image_object_is_copied_and_not_changed() -> None:
    source = gradient("RGBA")
    before = source.tobytes()
    image = load_image(source, media_table(max_pixels=100))
    image.paste(RED, (0, 0, *image.size))
    assert (source.mode, source.size, source.tobytes()) == ("RGBA", (64, 48), before)
    same = gradient()
    assert load_image(same, media_table()) is not same


def test_a_link_within_the_root_is_followed_and_one_that_leaves_it_is_refused(
    tmp_path: Path,
) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    gradient().save(root / "a.png")
    gradient().save(outside / "b.png")
    (root / "inner.png").symlink_to(root / "a.png")
    (root / "leak.png").symlink_to(outside / "b.png")
    (root / "leak").symlink_to(outside)
    assert load_image("inner.png", media_table(root)).size == (64, 48)
    for source in (
        "leak.png",
        "leak/b.png",
        "../outside/b.png",
        "leak/../outside/b.png",
        str(outside / "b.png"),
        f"file://{root}/../outside/b.png",
        f"file://{root}/%2e%2e/outside/b.png",
        {"bytes": None, "path": "../outside/b.png"},
    ):
        message = refused(source, media_table(root))
        assert str(outside / "b.png") in message or f"{tmp_path}/b.png" in message
        assert f"outside media.root {root}" in message
        assert "set media.root" in message


@pytest.mark.parametrize("load", [load_image, load_text])
def test_a_folder_that_becomes_a_link_before_it_is_opened_leads_nowhere(
    load: Callable[[str, MediaTable], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    for folder in (root / "charts", outside):
        folder.mkdir(parents=True)
        gradient().save(folder / "a.png")
    really_open = os.open

    def open_after_the_swap(path: Any, *arguments: Any, **keys: Any) -> int:
        if Path(path) == root / "charts" / "a.png":
            (root / "charts").rename(root / "before")
            (root / "charts").symlink_to(outside)
        return really_open(path, *arguments, **keys)

    monkeypatch.setattr(os, "open", open_after_the_swap)
    with pytest.raises(MediaError) as refusal:
        load("charts/a.png", media_table(root))
    assert f"the file is {outside}/a.png, outside media.root {root}" in str(refusal.value)


def test_a_root_that_is_itself_a_link_holds_its_files(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    gradient().save(tmp_path / "real" / "a.png")
    assert load_image("a.png", media_table(tmp_path / "link")).size == (64, 48)
    assert load_image(str(tmp_path / "real" / "a.png"), media_table(tmp_path / "link"))


def test_what_is_not_a_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    media = media_table(tmp_path)
    began = time.monotonic()
    assert "is a FIFO" in refused("pipe.png", media)
    assert "is a folder" in refused("folder.png", media)
    assert "is a device or socket" in refused("/dev/zero", media_table(Path("/")))
    assert time.monotonic() - began < 2


def test_the_byte_limit_holds_for_every_source(tmp_path: Path) -> None:
    with open(tmp_path / "sparse.png", "wb") as file:
        file.truncate(2**40)
    media = media_table(tmp_path, max_bytes=1000)
    assert "media.max_bytes is 1000" in refused("sparse.png", media)
    uri = "data:image/png;base64," + base64.b64encode(bytes(1001)).decode()
    assert "media.max_bytes is 1000" in refused(uri, media)


def png(width: int, height: int, body: bytes = b"") -> bytes:
    """An RGB PNG that claims a size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(body))
        + chunk(b"IEND", b"")
    )


PNG = encoded(gradient(), "PNG")
JPEG = encoded(gradient(), "JPEG")
BAD_FILES: dict[str, tuple[bytes, list[str]]] = {
    "empty": (b"", ["is empty", "give PNG"]),
    "text": (b"hello, no image here", ["not an image", "hello", "give PNG, JPEG"]),
    "html": (b"<!DOCTYPE html><title>404</title>", ["not an image", "<!DOCTYPE html>"]),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", ["not an image", "<svg"]),
    "pdf": (b"%PDF-1.7\n", ["not an image", "%PDF"]),
    "lfs pointer": (b"version https://git-lfs.github.com/spec/v1", ["not an image", "version"]),
    "icon": (encoded(gradient(), "ICO"), ["not an image"]),
    "ppm": (encoded(gradient(), "PPM"), ["not an image", "P6"]),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n", ["not an image"]),
    "png signature": (PNG[:8], ["broken, cut short", "save it again"]),
    "png header": (PNG[:33], ["broken, cut short"]),
    "png cut": (PNG[: len(PNG) // 2], ["broken, cut short"]),
    "png checksum": (PNG[:20] + b"\xff" + PNG[21:], ["broken, cut short"]),
    "png without pixels": (png(64, 64), ["broken, cut short"]),
    "png of no width": (png(0, 64), ["broken, cut short"]),
    "png of a terabyte": (png(2**20, 2**20), ["media.max_decode_bytes is 1073741824", "raise it"]),
    "png of one column": (png(1, 2**30), ["1×1073741824", "media.max_decode_bytes"]),
    "png of one row": (png(2**30, 1), ["1073741824×1", "media.max_decode_bytes"]),
    "jpeg signature": (JPEG[:4], ["broken, cut short"]),
    "jpeg cut": (JPEG[: len(JPEG) * 2 // 3], ["broken, cut short"]),
    "gif signature": (b"GIF89a", ["broken, cut short"]),
    "gif cut": (encoded(gradient("P"), "GIF")[:-200], ["broken, cut short"]),
    "bmp signature": (b"BM" + bytes(30), ["broken, cut short"]),
    "bmp cut": (encoded(gradient(), "BMP")[:-500], ["broken, cut short"]),
    "webp signature": (b"RIFF\x24\0\0\0WEBPVP8 " + bytes(20), ["broken, cut short"]),
    "webp cut": (encoded(gradient(), "WEBP")[:60], ["broken, cut short"]),
    "tiff signature": (b"II*\0\x08\0\0\0", ["broken, cut short"]),
    "tiff cut": (encoded(gradient(), "TIFF")[:-500], ["broken, cut short"]),
    "infinite": (encoded(Image.new("F", (2, 2), float("inf")), "TIFF"), ["inf", "finite values"]),
}


@pytest.mark.parametrize(("data", "words"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_a_bad_file_says_what_it_is_and_what_to_do(
    data: bytes, words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "bad.png").write_bytes(data)
    media = media_table(tmp_path)
    assert refused("bad.png", media).startswith("bad.png: ")
    assert refused({"bytes": data, "path": "bad.png"}, media).startswith("bad.png of ")
    for word in words:
        assert word in refused(data, media)


BAD_SOURCES: dict[str, tuple[Any, list[str]]] = {
    "missing": ("none.png", ["none.png: no such file under media.root", "check the path"]),
    "below a file": ("/dev/null/a.png", ["outside media.root"]),
    "no text": ("", ["empty path", "prompt.images"]),
    "none": (None, ["None", "check the template"]),
    "number": (float("nan"), ["nan (float)", "a path, a data: URI"]),
    "list": (["a.png"], ["['a.png'] (list)"]),
    "no bytes": ({"bytes": None, "path": None}, ["keys bytes, path"]),
    "other keys": ({"url": "a.png"}, ["keys url"]),
    "nul": ("a\0b.png", [r"'a\x00b.png'", "can't be read"]),
    "newline": ("a\nb.png", [r"'a\nb.png'"]),
    "bare base64": (base64.b64encode(bytes(5000)).decode(), ["characters)", "data:image/png"]),
    "data without base64": ("data:image/svg+xml,<svg/>", ["not base64", "data:image/png;base64"]),
    "data without comma": ("data:image/png;base64", ["not base64"]),
    "data with blanks": ("data:image/png;base64,iVBO Rw0K", ["base64 is broken", "encode"]),
    "data of odd length": ("data:image/png;base64,iVBOR", ["base64 is broken"]),
    "data not ascii": ("data:image/png;base64,ïVBO", ["base64 is broken"]),
    "data empty": ("data:image/png;base64,", ["is empty"]),
    "data of text": ("data:image/png;base64,aGVsbG8=", ["not an image", "hello"]),
    "s3": ("s3://bucket/a.png", ["s3://bucket/a.png", "can't be read from s3://", "download"]),
    "ftp": ("ftp://host/a.png", ["can't be read from ftp://"]),
    "file on a host": ("file://host/a.png", ["names another host", "file:///folder"]),
    "file with a query": ("file:///a.png?x", ["contains a ?"]),
    "unlisted host": (
        "https://example.com/a.png",
        ["example.com is not on media.allow_urls", "add"],
    ),
    "unlisted port": ("http://listed.test:8080/a.png", ['add "listed.test:8080"']),
    "user name": ("https://me:secret@listed.test/a.png", ["user name", "//listed.test/a.png"]),
    "no host": ("http:///a.png", ["no host"]),
    "no port": ("http://listed.test:99999/a.png", ["ort out of range"]),
    "bad address": ("http://[::1/a.png", ["Invalid IPv6"]),
    "unlisted address": ("http://169.254.169.254/latest/meta-data", ["not on media.allow_urls"]),
    "name of this machine": ("http://localhost/a.png", ["localhost resolves to", "not a public"]),
    "unpixeled": (Image.new("RGB", (0, 5)), ["0×5", "has no pixels"]),
    "unconvertible": (Image.new("La", (5, 5)), ["La", "unsupported kind"]),
}


@pytest.mark.parametrize(("source", "words"), BAD_SOURCES.values(), ids=BAD_SOURCES.keys())
def test_a_bad_source_says_what_it_is_and_what_to_do(
    source: Any, words: list[str], tmp_path: Path
) -> None:
    media = media_table(tmp_path, allow_urls=["listed.test", "localhost"])
    message = refused(source, media)
    for word in words:
        assert word in message
    assert len(message) < 600
    assert "\n" not in message
    assert "secret" not in message


def test_a_circle_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").symlink_to(tmp_path / "b.png")
    (tmp_path / "b.png").symlink_to(tmp_path / "a.png")
    assert "can't be read" in refused("a.png", media_table(tmp_path))


def test_a_misnamed_file_is_read_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(JPEG)
    assert load_image("a.png", media_table(tmp_path)).size == (64, 48)


def test_mutated_files_load_or_raise_media_error() -> None:
    generator = random.Random(3407)
    image = gradient(size=(40, 30))
    exif = Image.Exif()
    exif[0x0112] = 6
    seeds = [
        encoded(image, "PNG", exif=exif),
        encoded(image.quantize(16), "PNG", transparency=3),
        encoded(image.convert("I;16"), "PNG"),
        encoded(image, "JPEG", exif=exif),
        encoded(image, "JPEG", progressive=True),
        encoded(image.convert("CMYK"), "JPEG"),
        encoded(image, "WEBP"),
        encoded(image.convert("RGBA"), "WEBP", lossless=True),
        encoded(image, "GIF"),
        encoded(image, "BMP"),
        encoded(image, "TIFF", compression="tiff_lzw"),
        encoded(image.convert("F"), "TIFF"),
    ]
    media = media_table(max_pixels=500, max_decode_bytes=2**24)
    loaded = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of what it repairs
        for round_ in range(600):
            data = bytearray(seeds[round_ % len(seeds)])
            for _ in range(generator.randint(1, 8)):
                data[generator.randrange(len(data))] = generator.randrange(256)
            if generator.random() < 0.3:
                del data[generator.randrange(len(data)) :]
            try:
                result = load_image(bytes(data), media)
            except MediaError:
                continue
            loaded += 1
            assert result.mode == "RGB"
            assert 0 < result.width * result.height <= 500
    assert 0 < loaded < 600


def test_an_error_keeps_no_pixels_alive() -> None:
    with pytest.raises(MediaError) as caught:
        load_image(PNG[:-60], media_table())
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    assert [entry.name for entry in caught.traceback][1:] == ["load_image"]


# What the pixels become


@pytest.mark.parametrize(
    ("format", "mode"),
    [
        *[("PNG", mode) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")],
        *[("JPEG", mode) for mode in ("L", "RGB", "CMYK", "YCbCr")],
        *[("WEBP", mode) for mode in ("RGB", "RGBA")],
        *[("GIF", mode) for mode in ("1", "L", "P")],
        *[("BMP", mode) for mode in ("1", "L", "P", "RGB")],
        *[
            ("TIFF", mode)
            for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "I", "F")
        ],
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
    assert near(
        load_image(stripes, media_table(max_pixels=16)).getpixel((1, 1)), (255, 127, 127), 6
    )


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


@pytest.mark.parametrize(
    ("mode", "values", "grays"),
    [
        ("F", (0.0, 0.5, 1.0), (0, 128, 255)),
        ("F", (0.0, 128.0, 255.0), (0, 128, 255)),
        ("I", (0, 128, 255), (0, 128, 255)),
        ("I", (0, 32896, 65535), (0, 128, 255)),
        ("F", (-100.0, 0.0, 100.0), (0, 128, 255)),
        ("I", (-5, -5, -5), (0, 0, 0)),
    ],
)
def test_values_without_a_stated_range_take_the_smallest_that_holds_them(
    mode: str, values: tuple[float, ...], grays: tuple[int, ...]
) -> None:
    image = Image.new(mode, (3, 1))
    for x, value in enumerate(values):
        image.putpixel((x, 0), value)
    result = load_image(encoded(image, "TIFF"), media_table())
    assert [result.getpixel((x, 0)) for x in range(3)] == [(v, v, v) for v in grays]


@pytest.mark.parametrize("max_pixels", [10**6, 500], ids=["kept", "scaled"])
@pytest.mark.parametrize("format", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int, format: str, max_pixels: int) -> None:
    upright = Image.new("RGB", (160, 80), "white")
    upright.paste((200, 0, 0), (0, 0, 80, 40))  # red at the upper left
    upright.paste((0, 0, 200), (0, 40, 80, 80))  # blue at the lower left
    undo = {
        1: None,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = upright if undo is None else upright.transpose(undo)
    image = load_image(encoded(stored, format, exif=exif), media_table(max_pixels=max_pixels))
    assert image.width > image.height
    assert near(image.getpixel((image.width // 4, image.height // 4)), (200, 0, 0), 30)
    assert near(image.getpixel((image.width // 4, image.height * 3 // 4)), (0, 0, 200), 30)


def test_broken_exif_does_not_cost_the_image() -> None:
    data = encoded(gradient(), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert load_image(data, media_table()).size == (64, 48)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_frame_is_taken(format: str) -> None:
    first, second = (Image.new("RGB", (32, 32), color) for color in ("red", "blue"))
    options = {"lossless": True} if format == "WEBP" else {}
    data = encoded(first, format, save_all=True, append_images=[second] * 3, **options)
    assert near(load_image(data, media_table()).getpixel((5, 5)), RED)


# Sizes


def test_target_size_keeps_what_is_within_the_limits() -> None:
    assert target_size(640, 480, min_pixels=200704, max_pixels=1605632) == (640, 480)
    assert target_size(100, 100, min_pixels=10_000, max_pixels=10_000) == (100, 100)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
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


SMART = {  # of smart_resize, by the limits
    (200704, 1605632): {
        (100, 50): (640, 320),
        (449, 448): (448, 448),
        (3518, 2252): (1568, 992),
        (7448, 4353): (1632, 960),
        (10526, 424): (6304, 224),
        (5436, 42906): (448, 3552),
    },
    (65536, 16777216): {(100, 50): (384, 192), (800, 600): (800, 608), (7448, 4353): (5344, 3104)},
}


def test_smart_size_of() -> None:
    for (low, high), sizes in SMART.items():
        for size, expected in sizes.items():
            assert smart_size(*size, factor=32, min_pixels=low, max_pixels=high) == expected


def test_smart_size_is_what_the_processor_would_make() -> None:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize  # takes seconds

    sides = st.integers(1, 20_000)

    @given(sides, sides, st.sampled_from([28, 32]), st.sampled_from(list(SMART)))
    def check(width: int, height: int, factor: int, limits: tuple[int, int]) -> None:
        assume(max(width, height) <= LARGEST_ASPECT * min(width, height))
        size = smart_size(width, height, factor=factor, min_pixels=limits[0], max_pixels=limits[1])
        assert size[::-1] == smart_resize(height, width, factor, *limits)
        assume(max(size) <= LARGEST_ASPECT * min(size))
        assert size[::-1] == smart_resize(*size[::-1], factor, *limits)  # and is left as it is

    check()


def test_image_becomes_the_size_that_the_model_takes() -> None:
    media = MediaTable(factor=32, min_pixels=200704, max_pixels=1605632)
    assert load_image(Image.new("RGB", (3518, 2252)), media).size == (1568, 992)
    with pytest.raises(MediaError, match="2010×10 pixels: one side is over 200 times"):
        load_image(Image.new("RGB", (2010, 10)), media)
    with pytest.raises(MediaError, match="64×15424 pixels: one side is over 200 times"):
        load_image(Image.new("RGB", (84, 16721)), MediaTable(factor=32, max_pixels=1_200_000))


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


def test_small_images_are_scaled_up() -> None:
    image = load_image(gradient(size=(100, 50)), media_table(min_pixels=200704))
    assert image.size == (634, 317)


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


def test_a_reader_with_a_limit_of_its_own_says_so(monkeypatch: Any) -> None:
    data = encoded(gradient(), "WEBP")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert "store the image as PNG" in refused(data, media_table())


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


def write_huge_png(path: Path, color_type: int, row: bytes) -> None:
    """5436 × 42906 pixels, row by row."""
    packer = zlib.compressobj(1)
    body = b"".join(packer.compress(b"\0" + row) for _ in range(42906)) + packer.flush()
    with open(path, "wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        header = struct.pack(">IIBBBBB", 5436, 42906, 8, color_type, 0, 0, 0)
        for kind, data in ((b"IHDR", header), (b"IDAT", body), (b"IEND", b"")):
            PngImagePlugin.putchunk(file, kind, data)


@pytest.mark.parametrize(
    ("color_type", "left", "right"),
    [(2, b"\xc8\0\0", b"\0\0\xc8"), (6, b"\xc8\0\0\xff", b"\0\0\0\0")],
    ids=["RGB", "RGBA"],
)
def test_233_megapixels_load_within_the_stated_memory(
    color_type: int, left: bytes, right: bytes, tmp_path: Path
) -> None:
    write_huge_png(tmp_path / "huge.png", color_type, left * 2718 + right * 2718)
    gradient().save(tmp_path / "small.png")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", HUGE, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(found)
    assert found["size"] == [451, 3559]
    assert found["used"] < found["cap"]
    assert found["colors"] == [[200, 0, 0], [0, 0, 200] if color_type == 2 else [255, 255, 255]]


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


# URLs

Answer = Callable[[BaseHTTPRequestHandler], object]


class Server:
    """A real HTTP server; ``pages`` maps a path to what answers it."""

    def __init__(self) -> None:
        self.pages: dict[str, Answer] = {}
        self.seen: list[str] = []
        pages, seen = self.pages, self.seen

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                seen.append(f"{self.headers['Host']}{self.path}")
                pages[self.path](self)

            def log_message(self, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.http.server_address[1]
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def media(self, **keys: Any) -> MediaTable:
        return media_table(allow_urls=[f"127.0.0.1:{self.port}"], **keys)


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.http.shutdown()
    running.thread.join()
    running.http.server_close()


def page(body: bytes, status: int = 200, *, length: int | None = None, **headers: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        if length != -1:
            handler.send_header("Content-Length", str(len(body) if length is None else length))
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        try:
            handler.wfile.write(body)
        except OSError:
            pass  # the client has seen enough

    return answer


def test_a_listed_url_is_fetched_whatever_its_content_type_says(server: Server) -> None:
    server.pages["/a%20b.png?x=%2F&y=1"] = page(PNG, Content_Type="text/html")
    image = load_image(server.url("/a b.png?x=%2F&y=1#part"), server.media())
    assert image.size == (64, 48)
    assert server.seen == [f"127.0.0.1:{server.port}/a%20b.png?x=%2F&y=1"]


def test_a_web_page_in_place_of_an_image_is_recognised(server: Server) -> None:
    server.pages["/a.png"] = page(b"<html>sign in", Content_Type="image/png")
    message = refused(server.url("/a.png"), server.media())
    assert "not an image" in message
    assert "<html>sign in" in message


def test_no_host_is_contacted_that_is_not_listed(server: Server) -> None:
    for allow in ([], ["127.0.0.1"], ["example.com"], [f"127.0.0.1:{server.port + 1}"]):
        message = refused(server.url("/a.png"), media_table(allow_urls=allow))
        assert f'add "127.0.0.1:{server.port}"' in message
    assert server.seen == []


def test_a_name_for_a_private_address_is_refused_though_listed(server: Server) -> None:
    media = media_table(allow_urls=["localhost", f"localhost:{server.port}"])
    message = refused(f"http://localhost:{server.port}/a.png", media)
    assert "localhost resolves to" in message
    assert "not a public address" in message
    assert server.seen == []


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.0.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.1.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1",
        "fd00::1",
        "ff0e::1",
        "::ffff:10.0.0.1",
        "2002:7f00:1::",
        "64:ff9b::a00:1",
        "64:ff9b:1::a00:1",
        "::a00:1",
        "fec0::1",
    ],
)
def test_one_private_address_among_public_ones_refuses_the_name(
    address: str, monkeypatch: Any
) -> None:
    asked = []

    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        return [(2, 1, 6, "", (a, port)) for a in ("93.184.216.34", address)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    message = refused("http://pictures.test/a.png", media_table(allow_urls=["pictures.test"]))
    assert f"pictures.test resolves to {address}" in message
    assert asked == ["pictures.test"]


def test_the_address_that_was_checked_is_the_one_connected_to(monkeypatch: Any) -> None:
    """A resolver that changes its mind after the check (DNS rebinding) is not asked again."""
    asked: list[str] = []
    connected: list[Any] = []

    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        address = "93.184.216.34" if len(asked) == 1 else "127.0.0.1"
        return [(2, 1, 6, "", (address, port))]

    def connect(address: Any, **_: Any) -> None:
        connected.append(address)
        raise ConnectionRefusedError("no network here")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "create_connection", connect)
    message = refused("https://pictures.test/a.png", media_table(allow_urls=["Pictures.test"]))
    assert "no network here" in message
    assert asked == ["pictures.test"]
    assert connected == [("93.184.216.34", 443)]


def test_redirects_are_followed_on_the_list_and_three_at_most(server: Server) -> None:
    server.pages["/3"] = page(b"", 302, Location="/2")
    server.pages["/2"] = page(b"", 307, Location=server.url("/1"))
    server.pages["/1"] = page(b"", 301, Location="0")
    server.pages["/0"] = page(PNG)
    assert load_image(server.url("/3"), server.media()).size == (64, 48)
    server.pages["/4"] = page(b"", 303, Location="/3")
    assert "redirected more than 3 times" in refused(server.url("/4"), server.media())


@pytest.mark.parametrize(
    ("location", "word"),
    [
        ("http://169.254.169.254/latest", "169.254.169.254 is not on media.allow_urls"),
        ("http://127.0.0.1:1/a.png", "127.0.0.1:1 is not on media.allow_urls"),
        ("file:///etc/passwd", "can't be read from file://"),
        ("http://u:p@127.0.0.1/", "user name"),
        ("http://[::1", "Invalid IPv6"),
    ],
)
def test_a_redirect_off_the_list_is_refused(server: Server, location: str, word: str) -> None:
    server.pages["/a"] = page(b"", 302, Location=location)
    message = refused(server.url("/a"), server.media())
    assert word in message
    assert message.startswith(server.url("/a"))


def test_a_download_is_bounded_by_what_comes_and_not_by_what_is_stated(server: Server) -> None:
    media = server.media(max_bytes=100_000)
    server.pages["/stated"] = page(PNG, length=10**12)
    assert "has 1000000000000 bytes" in refused(server.url("/stated"), media)
    server.pages["/unstated"] = page(bytes(10_000_000), length=-1)
    assert "media.max_bytes is 100000" in refused(server.url("/unstated"), media)


def test_a_failed_download_says_why(server: Server) -> None:
    server.pages["/404"] = page(b"no", 404)
    assert "127.0.0.1 answered 404 Not Found" in refused(server.url("/404"), server.media())
    server.pages["/short"] = page(PNG, length=len(PNG) + 50)
    assert f"ended after {len(PNG)} of" in refused(server.url("/short"), server.media())
    server.pages["/junk"] = lambda handler: handler.wfile.write(b"\0junk\n")
    assert "download failed (BadStatusLine" in refused(server.url("/junk"), server.media())
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        message = refused(f"http://{address}/a.png", media_table(allow_urls=[address]))
    assert "ConnectionRefusedError" in message


def test_tls_that_fails_is_a_media_error(server: Server) -> None:
    message = refused(f"https://127.0.0.1:{server.port}/a.png", server.media())
    assert "download failed" in message


@pytest.mark.parametrize("start", [b"", b"HTTP/1.0 200 OK\r\n", b"HTTP/1.0 200 OK\r\n\r\n"])
def test_a_server_that_drips_is_cut_off(server: Server, start: bytes) -> None:
    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(start)
        for _ in range(100):
            try:
                handler.wfile.write(b"x")
            except OSError:
                return
            time.sleep(0.05)

    server.pages["/slow"] = drip
    url, began = server.url("/slow"), time.monotonic()
    with pytest.raises(MediaError, match=r"not complete after 0\.4 s"):
        fetch(url, url, server.media(), timeout_s=0.4)
    assert time.monotonic() - began < 2


def test_what_a_url_carries_in_its_query_stays_out_of_messages(server: Server) -> None:
    server.pages["/a?token=secret"] = page(b"", 500)
    message = refused(server.url("/a?token=secret"), server.media())
    assert message.startswith(f"{server.url('/a')}?…: 127.0.0.1 answered 500")
    assert "secret" not in message


def test_an_image_is_decoded_once_for_all_who_hold_it() -> None:
    shared, began, loads = SharedImages(), threading.Barrier(8), []

    def load() -> Image.Image:
        loads.append(1)
        time.sleep(0.05)  # long enough for the others to ask
        return Image.new("RGB", (8, 8))

    def get() -> Image.Image:
        began.wait()
        return shared.get("a.png", load)

    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(get) for _ in range(8)]
        images = [future.result() for future in futures]
    assert len(loads) == 1
    assert all(image is images[0] for image in images)
    assert shared.get("b.png", load) is not images[0]
    gone = weakref.ref(images[0])
    del images, futures
    gc.collect()
    assert gone() is None  # nothing is kept for its own sake
    shared.get("a.png", load)
    assert len(loads) == 3


def test_a_failed_image_is_tried_by_each_who_names_it() -> None:
    shared = SharedImages()

    def fail() -> Image.Image:
        raise MediaError("broken")

    for _ in range(2):
        with pytest.raises(MediaError, match="broken"):
            shared.get("a.png", fail)
    assert shared.get("a.png", lambda: Image.new("RGB", (8, 8))).size == (8, 8)
