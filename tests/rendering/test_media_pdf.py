"""A page of a PDF is an image like any other: drawn at a resolution, within the same limits."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from batchkit.rendering.media import load_image
from tests.support.images import media_table, refused
from tests.support.pdfs import LETTER, encrypted, of_objects, of_streams, pdf, write_pdfs

HALF_BLACK = b"0 0 72 36 re f"  # the lower half of a square inch
INCH = (72, 72)


TREE = [
    b"<< /Type /Catalog /Pages 2 0 R >>",
    b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
]
PAGE = b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 72 72] %b >>"


def with_picture(width: int, height: int) -> bytes:
    """A page with a picture of so many pixels: gray, packed, and cut short."""
    size = b"/Width %d /Height %d /ColorSpace /DeviceGray /BitsPerComponent 8" % (width, height)
    return of_objects(
        [
            *TREE,
            PAGE % b"/Contents 4 0 R /Resources << /XObject << /I 5 0 R >> >>",
            b"<< /Length 24 >>\nstream\nq 72 0 0 72 0 0 cm /I Do Q\nendstream",
            b"<< /Type /XObject /Subtype /Image %b /Length 4 >>\nstream\n\0\0\0\0\nendstream"
            % size,
        ]
    )


def test_a_page_is_drawn_at_the_resolution(tmp_path: Path) -> None:
    write_pdfs(tmp_path, a=of_streams([b"", HALF_BLACK], INCH))
    image = load_image("a.pdf#page=2", media_table(tmp_path, pdf_dpi=100))
    assert (image.mode, image.size) == ("RGB", (100, 100))
    assert image.getpixel((50, 20)) == (255, 255, 255)
    assert image.getpixel((50, 80)) == (0, 0, 0)


@pytest.mark.parametrize(
    ("keys", "size"),
    [
        ({}, (1113, 1441)),  # 1275x1650, over 1605632 pixels
        ({"pdf_dpi": 72}, LETTER),
        ({"pdf_dpi": 72, "max_pixels": 10_000}, (87, 113)),
        ({"pdf_dpi": 72, "factor": 32}, (608, 800)),
        ({"pdf_dpi": 1, "min_pixels": 10_000}, (86, 118)),  # of 8x11
    ],
)
def test_the_limits_of_images_hold(
    tmp_path: Path, keys: dict[str, Any], size: tuple[int, int]
) -> None:
    write_pdfs(tmp_path, a=pdf("one"))
    assert load_image("a.pdf#page=1", media_table(tmp_path, **keys)).size == size


def test_only_a_pdf_of_one_page_needs_no_number(tmp_path: Path) -> None:
    write_pdfs(tmp_path, one=pdf("one"), two=pdf("one", "two"))
    media = media_table(tmp_path, pdf_dpi=20)
    pictures = [
        load_image(source, media)
        for source in (
            "one.pdf",
            tmp_path / "one.pdf",
            f"file://{tmp_path}/one.pdf#page=1",
            pdf("one"),
            {"bytes": pdf("one")},
            "data:application/pdf;base64," + base64.b64encode(pdf("one")).decode(),
        )
    ]
    assert {picture.tobytes() for picture in pictures} == {pictures[0].tobytes()}
    assert "is a PDF of 2 pages; select one, as in a.pdf#page=1" in refused("two.pdf", media)


def test_what_was_filled_into_a_form_is_drawn(tmp_path: Path) -> None:
    field = b"/FT /Tx /T (t) /V (x) /Rect [10 10 50 50] /F 4 /P 3 0 R /AP << /N 5 0 R >>"
    form = b"/Subtype /Form /BBox [0 0 40 40] /Length 14 >>\nstream\n0 0 40 40 re f\nendstream"
    parts = [
        b"<< /Type /Catalog /Pages 2 0 R /AcroForm << /Fields [4 0 R] >> >>",
        TREE[1],
        PAGE % b"/Annots [4 0 R]",
        b"<< /Type /Annot /Subtype /Widget %b >>" % field,
        b"<< /Type /XObject %b" % form,
    ]
    write_pdfs(tmp_path, form=of_objects(parts))
    image = load_image("form.pdf", media_table(tmp_path, pdf_dpi=72))
    assert image.getpixel((30, 42)) == (0, 0, 0)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("a.pdf#page=3", "a.pdf#page=3: has only 2 pages, so there is no page 3"),
        ("no.pdf#page=1", "no.pdf#page=1: no such file under media.root"),
        ("../a.pdf#page=1", "outside media.root"),
        ("locked.pdf#page=1", "locked.pdf#page=1: needs a password"),
        ("broken.pdf#page=1", "broken.pdf#page=1: is broken ("),
        ("text.pdf#page=1", "text.pdf#page=1: is not a PDF: it begins with b'words'"),
        ("text.pdf", "text.pdf: is not an image that can be read"),
        ("empty.pdf#page=1", "empty.pdf#page=1: is empty"),
    ],
)
def test_a_page_that_can_not_be_drawn_is_refused(tmp_path: Path, source: str, problem: str) -> None:
    (tmp_path / "a.pdf").write_bytes(pdf("outside"))
    write_pdfs(
        tmp_path / "root",
        a=pdf("one", "two"),
        locked=encrypted("one"),
        broken=pdf("one")[:200],
        text=b"words",
        empty=b"",
    )
    assert problem in refused(source, media_table(tmp_path / "root"))


def test_a_pdf_is_limited_as_any_file(tmp_path: Path) -> None:
    write_pdfs(tmp_path, a=pdf("one"), picture=with_picture(20_000, 20_000))
    assert "media.max_bytes is 100" in refused("a.pdf", media_table(tmp_path, max_bytes=100))
    problem = refused("picture.pdf", media_table(tmp_path))
    assert "the pictures of the page need 1600000000 bytes to decode" in problem
    assert "media.max_decode_bytes is 1073741824" in problem


def test_an_image_whose_name_has_a_number_sign_is_a_file(tmp_path: Path) -> None:
    Image.new("RGB", (4, 2)).save(tmp_path / "a#page=1.png")
    assert load_image("a#page=1.png", media_table(tmp_path)).size == (4, 2)
