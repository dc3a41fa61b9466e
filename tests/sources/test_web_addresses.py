"""Input at http(s) URLs, from servers that differ in what they can do."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchkit.errors import InputError
from batchkit.sources.fingerprint import fingerprint
from tests.support import dry_runs
from tests.support.dry_runs import LOG, RUN, run, settled
from tests.support.pdfs import pdf
from tests.support.sources import rows_of, table, write_rows
from tests.support.web import Files, web_server

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


class Stream(Files):
    """As programs send what they make at each request: its length is not known."""

    def send_header(self, keyword: str, value: str) -> None:
        if keyword not in ("Content-Length", "Last-Modified"):
            super().send_header(keyword, value)


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of the working directory."""
    handler = functools.partial(getattr(request, "param", Files), directory=".")
    with web_server(handler) as url:
        yield url


@pytest.mark.parametrize("name", ["rows.parquet", "rows.xlsx"])
@pytest.mark.parametrize("server", [Stream], indirect=True)
def test_table_that_a_server_sends_only_as_a_whole_is_copied(server: str, name: str) -> None:
    write_rows(Path(), name)
    assert [row.id for row in rows_of(f"{server}/{name}", id="id")] == ["a", "b", "c", "d"]


@pytest.mark.parametrize("name", ["rows.jsonl", "*.jsonl"])
def test_server_that_can_not_be_reached_is_named_with_the_reason(name: str) -> None:
    with pytest.raises(InputError, match=r"can't be opened: Cannot connect to host [^;]*$"):
        fingerprint(table(f"http://127.0.0.1:1/{name}"))


def test_pages_of_a_pdf_at_a_url_with_a_query_are_drawn(server: str) -> None:
    Path("a.pdf").write_bytes(pdf("one", "two"))
    dry_runs.write_job(
        input={"path": f"{server}/a.pdf?version=2"},
        prompt={"images": ["{{ image }}"], "user": "{{ page }}"},
        media={"allow_urls": [server.removeprefix("http://")]},
    )
    assert run().exit_code == 0
    assert settled() == dict.fromkeys(range(2), "ok")


def test_pdf_at_a_signed_url_is_the_same_input_with_another_signature(server: str) -> None:
    """And no file of the run has it."""
    Path("a.pdf").write_bytes(pdf("one", "two", "three"))
    dry_runs.write_job(prompt={"user": "{{ page_text }}"})
    url = f"{server}/a.pdf?X-Amz-Date=1&X-Amz-Signature="
    assert run("--set", f"input.path={url}{'5ec4e7' * 8}", "--set", "input.limit=1").exit_code == 0
    again = run("--set", f"input.path={url}{'0c0ffee' * 8}")
    assert (again.exit_code, again.json["skipped"]) == (0, 1)
    assert settled() == dict.fromkeys(range(3), "ok")
    assert f"{url}***#page=3" in LOG.read_text()
    for path in RUN.iterdir():
        if path.is_file():
            assert not re.search(rb"5ec4e7|0c0ffee", path.read_bytes()), path
