"""A row for each page of each PDF; what can't be opened fails alone, and few pages are held."""

from __future__ import annotations

import os
import re
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import fsspec
import psutil
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from batchkit.config.installation import how_to_install
from batchkit.errors import InputError, MediaError
from batchkit.sources import count_rows, read_rows
from tests.support import dry_runs
from tests.support.dry_runs import records, run, settled
from tests.support.pdfs import encrypted, of_streams, pdf, write_pdfs
from tests.support.sources import rows_of, table

pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.slow]

PAGE = {"images": ["{{ image }}"], "user": "{{ page }} of {{ pages }}: {{ page_text }}"}


def write_job(path: str = "scans", **tables: dict[str, Any]) -> None:
    prompt = tables.pop("prompt", PAGE)
    dry_runs.write_job(
        input={"path": path}, prompt=prompt, output={"keep": ["name", "page"]}, **tables
    )


def test_each_page_is_a_row() -> None:
    folder = write_pdfs(Path("scans"), a=pdf("one", "two"), b=pdf("three")).resolve()
    Path("scans/notes.txt").write_text("x")
    rows = rows_of(folder)
    assert [(row.index, row.id) for row in rows] == [
        (0, f"{folder}/a.pdf#page=1"),
        (1, f"{folder}/a.pdf#page=2"),
        (2, f"{folder}/b.pdf#page=1"),
    ]
    fields = dict(rows[1].fields)
    assert fields.pop("sha256") == rows[0].fields["sha256"] != rows[2].fields["sha256"]
    assert fields == {
        "path": f"{folder}/a.pdf",
        "name": "a.pdf",
        "stem": "a",
        "suffix": ".pdf",
        "image": f"{folder}/a.pdf#page=2",
        "page": 2,
        "pages": 2,
        "page_text": "two",
    }
    assert count_rows(table(folder)) == 3
    assert [row.index for row in read_rows(table(folder), skip={0, 2}.__contains__)] == [1]


def test_the_text_of_a_page_has_its_lines_and_hyphens() -> None:
    lines = b"BT /F1 12 Tf 20 700 Td (an exam-) Tj 0 -14 Td (ple here) Tj 0 -40 Td (end) Tj ET"
    folder = write_pdfs(Path("scans"), a=of_streams([lines, b"0 0 10 10 re f"]))
    first, second = rows_of(folder.resolve())
    assert first.fields["page_text"] == "an exam-ple here\nend"
    assert second.fields["page_text"] == ""


def test_pages_are_drawn_and_their_text_is_in_the_prompt() -> None:
    write_pdfs(Path("scans"), a=pdf("one", "two"))
    write_job()
    shown = run("--dry-run").stdout
    assert "row 1 (id scans/a.pdf#page=2)" in shown
    assert "user: <image>2 of 2: two" in shown
    assert "images: 1113x1441" in shown  # max_pixels; 1275x1650 at 150 dpi


def test_a_pdf_that_can_not_be_opened_fails_alone() -> None:
    broken = pdf("broken")[:200]
    write_pdfs(
        Path("scans"), a=pdf("one"), b=broken, c=encrypted("two"), d=b"", e=b"text", f=pdf("six")
    )
    write_job()
    ended = run()
    assert (ended.exit_code, ended.json["total"], ended.json["ok"]) == (3, 6, 2)
    found = {record["id"]: record for record in records()}
    ok = {name for name, record in found.items() if record["status"] == "ok"}
    assert ok == {f"scans/{stem}.pdf#page=1" for stem in "af"}
    problems = {"b": "is broken (", "c": "needs a password", "d": "is empty", "e": "is not a PDF"}
    for stem, problem in problems.items():
        record = found[f"scans/{stem}.pdf"]
        assert record["error"]["kind"] == "media"
        assert f"scans/{stem}.pdf: {problem}" in record["error"]["message"]
        assert record["fields"] == {"name": f"{stem}.pdf", "page": None}


def test_a_changed_pdf_is_answered_again_and_the_others_are_kept() -> None:
    write_pdfs(Path("scans"), a=pdf("one"), b=pdf("two")[:200], c=pdf("three", "four"))
    write_job()
    assert run().exit_code == 3
    assert run().json["skipped"] == 4
    write_pdfs(Path("scans"), b=pdf("now", "two", "pages"))
    refused = run()
    assert (refused.exit_code, "scans/b.pdf: " in refused.stderr) == (2, True)
    assert "3 records kept, 1 rows to run again" in run("--on-change", "requeue").stderr
    assert settled() == dict.fromkeys(range(6), "ok")
    pages = [f"scans/{page[0]}.pdf#page={page[1]}" for page in ("a1", "b1", "b2", "b3", "c1", "c2")]
    assert [record["id"] for record in sorted(records(), key=lambda r: r["index"])] == pages


def test_pdfs_at_a_url_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    store = fsspec.filesystem("memory")
    store.pipe({"/scans/a.pdf": pdf("one", "two"), "/scans/b.pdf": b"", "/scans/c.pdf": pdf("3")})
    shared = MemoryFileSystem._open

    def own(*args: Any, **kwargs: Any) -> BytesIO:
        """As any other store does: this one gives all who open a file one object."""
        return BytesIO(shared(*args, **kwargs).getvalue())

    monkeypatch.setattr(MemoryFileSystem, "_open", own)
    try:
        write_job("memory://scans/*.pdf")
        assert run().exit_code == 3
        found = {record["id"]: record["status"] for record in records()}
        ok = dict.fromkeys(["a.pdf#page=1", "a.pdf#page=2", "c.pdf#page=1"], "ok")
        assert found == {**ok, "b.pdf": "failed"}
    finally:
        store.rm("/scans", recursive=True)


def test_the_process_that_reads_pdfs_may_be_killed() -> None:
    folder = write_pdfs(Path("scans"), a=pdf("one", "two", "three")).resolve()
    rows = read_rows(table(folder))
    next(rows)
    (child,) = readers_of(os.getpid())
    os.kill(child, 9)
    assert [row.fields["page_text"] for row in rows] == ["two", "three"]


def readers_of(parent: int) -> list[int]:
    return [
        child.pid
        for server in psutil.Process(parent).children()
        if "batchkit.isolation.pdf_child" in server.cmdline()
        for child in server.children()
        if child.status() != psutil.STATUS_ZOMBIE
    ]


def test_without_pypdfium2_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = write_pdfs(Path("scans"), a=pdf("one")).resolve()
    monkeypatch.setitem(sys.modules, "pypdfium2", None)
    words = re.escape(f"scans/a.pdf: a PDF needs pypdfium2: {how_to_install('pdf')}")
    with pytest.raises(InputError, match=words):
        rows_of(folder)


def test_a_page_that_can_not_be_read_fails_alone() -> None:
    """The second page's entry is no page."""
    whole = pdf("one", "two", "three")
    start = whole.index(b"/Type /Page /Parent", whole.index(b"/Type /Page /Parent") + 1)
    broken = whole[:start] + b"/Type /Pagx /Parent" + whole[start + 19 :]
    rows = rows_of(write_pdfs(Path("scans"), a=broken).resolve())
    assert len(rows) == 3, rows
    assert all(row.error is None or isinstance(row.error, MediaError) for row in rows)
