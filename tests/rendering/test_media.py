"""Images: what load_image accepts, how it scales, and that its only exception is MediaError."""

from __future__ import annotations

import base64
import gc
import os
import random
import struct
import threading
import time
import warnings
import weakref
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, PngImagePlugin

from batchkit.config.tables import MediaTable
from batchkit.errors import MediaError
from batchkit.rendering.media import SharedMedia, load_image, load_text
from tests.support.images import JPEG, PNG, RED, encoded, gradient, media_table, refused

pytestmark = pytest.mark.slow

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
    (tmp_path / "link").symlink_to(root)  # the root itself may be one
    (root / "inner.png").symlink_to(root / "a.png")
    (root / "leak.png").symlink_to(outside / "b.png")
    (root / "leak").symlink_to(outside)
    for place, source in ((root, "inner.png"), ("link", "a.png"), ("link", str(root / "a.png"))):
        assert load_image(source, media_table(tmp_path / place)).size == (64, 48)
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


def test_what_is_not_a_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    media = media_table(tmp_path)
    # Opening a pipe that nobody writes to would never return.
    assert "it is a named pipe" in refused("pipe.png", media)
    assert "Is a directory" in refused("folder.png", media)
    assert "it is a device" in refused("/dev/zero", media_table(Path("/")))


def test_the_byte_limit_holds_for_every_source(tmp_path: Path) -> None:
    with open(tmp_path / "sparse.png", "wb") as file:
        file.truncate(2**40)
    media = media_table(tmp_path, max_bytes=1000)
    assert "media.max_bytes is 1000" in refused("sparse.png", media)
    uri = "data:image/png;base64," + base64.b64encode(bytes(1001)).decode()
    assert "media.max_bytes is 1000" in refused(uri, media)


def png(width: int, height: int, body: bytes = b"") -> bytes:
    """An RGB PNG that claims a size."""

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    file = BytesIO()
    file.write(b"\x89PNG\r\n\x1a\n")
    for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(body)), (b"IEND", b"")):
        PngImagePlugin.putchunk(file, kind, data)
    return file.getvalue()


BAD_FILES: dict[str, tuple[bytes, list[str]]] = {
    "empty": (b"", ["is empty", "give PNG"]),
    "text": (b"hello, no image here", ["not an image", "hello", "give PNG, JPEG"]),
    "html": (b"<!DOCTYPE html><title>404</title>", ["not an image", "<!DOCTYPE html>"]),
    "pdf": (b"%PDF-1.7\n", ["is broken (Failed to load document", "save it again"]),
    "ppm": (encoded(gradient(), "PPM"), ["not an image", "P6"]),
    "png header": (PNG[:33], ["broken, cut short"]),
    "png cut": (PNG[: len(PNG) // 2], ["broken, cut short"]),
    "png checksum": (PNG[:20] + b"\xff" + PNG[21:], ["broken, cut short"]),
    "png without pixels": (png(64, 64), ["broken, cut short"]),
    "png of no width": (png(0, 64), ["broken, cut short"]),
    "png of a terabyte": (png(2**20, 2**20), ["media.max_decode_bytes is 1073741824", "raise it"]),
    "png of one row": (png(2**30, 1), ["1073741824×1", "media.max_decode_bytes"]),
    "jpeg cut": (JPEG[: len(JPEG) * 2 // 3], ["broken, cut short"]),
    "gif cut": (encoded(gradient("P"), "GIF")[:-200], ["broken, cut short"]),
    "bmp cut": (encoded(gradient(), "BMP")[:-500], ["broken, cut short"]),
    "webp signature": (b"RIFF\x24\0\0\0WEBPVP8 " + bytes(20), ["broken, cut short"]),
    "webp cut": (encoded(gradient(), "WEBP")[:60], ["broken, cut short"]),
    "tiff cut": (encoded(gradient(), "TIFF")[:-500], ["broken, cut short"]),
    "floats": (encoded(Image.new("F", (2, 2)), "TIFF"), ["has 32-bit gray", "save it with 16"]),
}


@pytest.mark.parametrize(("data", "words"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_a_bad_file_says_what_it_is_and_what_to_do(
    data: bytes, words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "bad.png").write_bytes(data)
    media = media_table(tmp_path)
    assert refused("bad.png", media).startswith("bad.png: ")
    assert refused({"bytes": data, "path": "bad.png"}, media).startswith("bad.png: ")
    for word in words:
        assert word in refused(data, media)


BAD_SOURCES: dict[str, tuple[Any, list[str]]] = {
    "missing": ("none.png", ["none.png: no such file under media.root", "check the path"]),
    "below a file": ("/dev/null/a.png", ["outside media.root"]),
    "no text": ("", ["empty path", "prompt.images"]),
    "none": (None, ["None", "check the template"]),
    "number": (float("nan"), ["nan (float)", "a path, a data: URI"]),
    "list": (["a.png"], ["['a.png'] (list)"]),
    "no bytes": ({"bytes": None, "path": None}, ["'path': None} (dict)", "a path, a data: URI"]),
    "nul": ("a\0b.png", [r"'a\x00b.png'", "can't be read"]),
    "newline": ("a\nb.png", [r"'a\nb.png'"]),
    "bare base64": (base64.b64encode(bytes(5000)).decode(), ["characters)", "data:image/png"]),
    "data without base64": ("data:image/svg+xml,<svg/>", ["not base64", "data:image/png;base64"]),
    "data without comma": ("data:image/png;base64", ["not base64"]),
    "data with blanks": ("data:image/png;base64,iVBO Rw0K", ["base64 is broken", "encode"]),
    "data of text": ("data:image/png;base64,aGVsbG8=", ["not an image", "hello"]),
    "s3": ("s3://bucket/a.png", ["s3://bucket/a.png", "can't be read from s3://", "download"]),
    "ftp": ("ftp://host/a.png", ["can't be read from ftp://"]),
    "file on a host": ("file://host/a.png", ["names another host", "file:///folder"]),
    "file with a query": ("file:///a.png?x", ["contains a ?"]),
    "user name": ("https://me:secret@listed.test/a.png", ["user name", "//listed.test/a.png"]),
    "no host": ("http:///a.png", ["its host or port is not valid"]),
    "no such host": ("http://[a/a.png", ["its host or port is not valid"]),
    "no port": ("http://listed.test:99999/a.png", ["its host or port is not valid"]),
    "bad address": ("http://[::1/a.png", ["its host or port is not valid"]),
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
    assert [entry.name for entry in caught.traceback][1:] == ["load_image", "load_media"]


def test_an_image_is_decoded_once_for_all_who_hold_it() -> None:
    shared, began, loads = SharedMedia(), threading.Barrier(8), []

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
    shared = SharedMedia()

    def fail() -> Image.Image:
        raise MediaError("broken")

    for _ in range(2):
        with pytest.raises(MediaError, match="broken"):
            shared.get("a.png", fail)
    assert shared.get("a.png", lambda: Image.new("RGB", (8, 8))).size == (8, 8)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        *(
            ("Grüße\n".encode(encoding), r"is (UTF-16|not) text.*; save .*UTF-8")
            for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32")
        ),
        (PNG, "is not text: it has NUL bytes"),
    ],
)
def test_what_is_no_text_in_utf_8_is_refused(data: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(data)
    with pytest.raises(MediaError, match=rf"a\.txt: {words}"):
        load_text("a.txt", media_table(tmp_path))
