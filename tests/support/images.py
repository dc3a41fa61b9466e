"""Images, and what ``load_image`` refuses."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from batchkit.config.tables import MediaTable
from batchkit.errors import MediaError
from batchkit.rendering.media import load_image

RED, WHITE, BLUE = (255, 0, 0), (255, 255, 255), (0, 0, 255)


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


def png(color: tuple[int, int, int] = RED, size: tuple[int, int] = (4, 2)) -> bytes:
    return encoded(Image.new("RGB", size, color), "PNG")


PNG = encoded(gradient(), "PNG")
JPEG = encoded(gradient(), "JPEG")
