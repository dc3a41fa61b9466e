"""PDFs, written by hand: the test knows each byte of them."""

from __future__ import annotations

from pathlib import Path

LETTER = (612, 792)
FONT = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"


def pdf(*pages: str, size: tuple[float, float] = LETTER) -> bytes:
    """A page for each text, in black on white at the top."""
    return of_streams(
        [b"BT /F1 24 Tf 20 %d Td (%s) Tj ET" % (size[1] - 40, page.encode()) for page in pages],
        size,
    )


def of_streams(streams: list[bytes], size: tuple[float, float] = LETTER) -> bytes:
    """A page for each content stream."""
    numbers = range(4, 4 + 2 * len(streams), 2)
    kids = b" ".join(b"%d 0 R" % number for number in numbers)
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [%s] /Count %d >>" % (kids, len(streams)),
        FONT,
    ]
    for number, stream in zip(numbers, streams, strict=True):
        objects += [
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 %g %g] /Contents %d 0 R"
            b" /Resources << /Font << /F1 3 0 R >> >> >>" % (*size, number + 1),
            b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
        ]
    return of_objects(objects)


def of_objects(objects: list[bytes], trailer: bytes = b"") -> bytes:
    content, starts = b"%PDF-1.4\n", list[int]()
    for number, body in enumerate(objects, start=1):
        starts.append(len(content))
        content += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % start for start in starts)
    return content + (
        b"xref\n0 %d\n0000000000 65535 f \n%strailer\n<< /Size %d /Root 1 0 R %s >>\nstartxref\n%d\n%%%%EOF\n"
        % (len(objects) + 1, table, len(objects) + 1, trailer, len(content))
    )


def encrypted(*pages: str) -> bytes:
    """It asks for a password: no password fits its keys."""
    security = (
        b"/Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O <%s> /U <%s> >> /ID [<00> <00>]"
        % (b"00" * 32, b"11" * 32)
    )
    whole = pdf(*pages)
    return whole.replace(b"/Root 1 0 R", b"/Root 1 0 R " + security)


def write_pdfs(folder: Path, **files: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    for stem, content in files.items():
        (folder / f"{stem}.pdf").write_bytes(content)
    return folder
