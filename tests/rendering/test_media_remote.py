"""``media.root`` as an fsspec URL: what is read below it, what is refused, and what errors tell."""

from __future__ import annotations

import base64
import multiprocessing
import re
import sys
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from batchkit.commands.report import report
from batchkit.config.tables import JobConfig, MediaTable
from batchkit.config.urls import failure
from batchkit.errors import InputError, JobError, MediaError
from batchkit.execution.processor import ProductionBatchProcessor
from batchkit.rendering.media import load_image, load_text
from batchkit.rendering.renderer import PromptRenderer
from batchkit.sources import read_rows
from tests.support import dry_runs
from tests.support.images import png
from tests.support.images import refused as refused_image
from tests.support.pages import data_in
from tests.support.web import Files, Page, web_server

ROOT = "memory://bucket/images"


def media(root: str = ROOT, **keys: Any) -> MediaTable:
    return MediaTable(root=root, **keys)


def refused(source: Any, table: MediaTable) -> str:
    message = refused_image(source, table)
    assert "\n" not in message
    assert "secret" not in message
    return message


@pytest.fixture(autouse=True)
def bucket() -> Iterator[Any]:
    """Images below the root, and two beside it that must stay unread."""
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe("/bucket/images/a.png", png())
    filesystem.pipe("/bucket/images/deep/b.png", png())
    filesystem.pipe("/bucket/images2/a.png", png())
    filesystem.pipe("/bucket/beside.png", png())
    yield filesystem
    filesystem.rm("/bucket", recursive=True)


# What is read


@pytest.mark.parametrize("root", [ROOT, ROOT + "/", "memory:///bucket/images"])
@pytest.mark.parametrize(
    "source",
    [
        "deep/b.png",
        "./deep/./b.png",
        "ROOT/deep/b.png",
        Path("deep/b.png"),
        {"bytes": None, "path": "deep/b.png"},
        png(),
        "data:image/png;base64," + base64.b64encode(png()).decode(),
        {"bytes": png(), "path": "none.png"},
    ],
    ids=lambda source: str(source)[:20],
)
def test_a_path_is_looked_up_below_the_url(root: str, source: Any) -> None:
    if isinstance(source, str):
        source = source.replace("ROOT", root.rstrip("/"))
    assert load_image(source, media(root)).tobytes() == load_image(png(), media()).tobytes()


def test_texts_are_read_below_the_url(bucket: Any) -> None:
    bucket.pipe("/bucket/images/t.csv", "\ufeffgröße".encode())
    bucket.pipe("/bucket/images/empty.csv", b"")
    assert load_text("t.csv", media()) == "größe"
    assert load_text(f"{ROOT}/t.csv", media()) == "größe"
    assert load_text("empty.csv", media()) == ""
    with pytest.raises(MediaError, match=r"\.\./t\.csv: contains a \.\."):
        load_text("../t.csv", media())


# What is refused


UPWARD = [
    "../beside.png",
    "..",
    "deep/../a.png",
    "deep/..",
    "%2e%2e/beside.png",
    "%2E./beside.png",
    "deep/..%2fa.png",
    "deep%2F..%2Fa.png",
    "%252e%252e/beside.png",
    "..\\beside.png",
    "deep%5c..%5Ca.png",
    f"{ROOT}/../beside.png",
    f"{ROOT}/%2e%2e/beside.png",
]
OUTSIDE = [
    "memory://bucket/images2/a.png",
    "memory://bucket/beside.png",
    "memory://bucket/images",
    "/bucket/images/a.png",
    "s3://bucket/images/a.png",
    "file:///etc/hostname",
    "ftp://me:secret@host/a.png?token=secret",
]
BAD = {
    "none.png": f"none.png: no such file under media.root {ROOT}",
    "a.png/b.png": "no such file",
    "deep": "is a folder",
    "": "empty path",
    "empty.png": "is empty",
    "text.png": "not an image",
    "large.png": "has 1001 bytes or more",
    "https://example.com/a.png": 'add "example.com"',
}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        *((path, f"{path}: contains a .., which could lead outside media.root {ROOT}") for path in UPWARD),
        *((path, f"is outside media.root {ROOT}; give the path below it") for path in OUTSIDE),
        *BAD.items(),
    ],
)  # fmt: skip
def test_what_is_refused(source: str, words: str, bucket: Any) -> None:
    bucket.pipe("/bucket/images/empty.png", b"")
    bucket.pipe("/bucket/images/text.png", b"hello")
    bucket.pipe("/bucket/images/large.png", bytes(1001))
    assert words in refused(source, media(max_bytes=1000))


def test_dots_in_a_name_are_no_way_up(bucket: Any) -> None:
    for name in ("..a.png", "a..png", "...", "deep/b...png", "50%..png", "%2e%2ea.png"):
        bucket.pipe(f"/bucket/images/{name}", png())
        assert load_image(name, media()).size == (4, 2)


def test_syntax_of_a_store_s_own_does_not_lead_out_of_the_root() -> None:
    """To fsspec's git, ``x:path`` and ``x@path`` are ``path``, wherever they are."""

    class Own(MemoryFileSystem):
        protocol = "own"

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return str(super()._strip_protocol(re.split("[:@]", path.removeprefix("own://"))[-1]))

    fsspec.register_implementation("own", Own, clobber=True)
    table = media("own://bucket/images")
    assert load_image("a.png", table).size == (4, 2)
    for source in ("x:bucket/beside.png", "x@/bucket/beside.png", "x@in/a.png:beside.png"):
        assert "is outside media.root" in refused(source, table)


def test_a_file_of_max_bytes_is_read(bucket: Any) -> None:
    bucket.pipe("/bucket/images/exact.txt", b"x" * 1000)
    assert len(load_text("exact.txt", media(max_bytes=1000))) == 1000


# Real stores: an asynchronous one over HTTP, and a zip archive that one thread reads at a time


class Faulty(Page):
    """States 5 bytes and sends 10,000; or fails when it is to send them."""

    def do_HEAD(self) -> None:
        self.reply(200, b"", Content_Length=5)

    def do_GET(self) -> None:
        self.reply(500 if "500" in self.path else 200, bytes(10_000))


@pytest.fixture
def serve() -> Iterator[Any]:
    """Starts a server for a handler; gives its root as a URL of fsspec."""
    with ExitStack() as running:
        yield lambda handler: f"dir://images::{running.enter_context(web_server(handler))}"


@pytest.fixture(params=["memory", "http", "zip"])
def many(request: Any, bucket: Any, serve: Any, tmp_path: Path) -> str:
    """A root with 40 images, each of its own colour."""
    files = {f"{n}.png": png((n, 0, 0)) for n in range(40)}
    if request.param == "memory":
        bucket.pipe({f"/bucket/images/{name}": data for name, data in files.items()})
        return ROOT
    if request.param == "zip":
        with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
            for name, data in files.items():
                archive.writestr(f"images/{name}", data)
        return f"zip://images::{tmp_path}/all.zip"
    (tmp_path / "images").mkdir()
    for name, data in files.items():
        (tmp_path / "images" / name).write_bytes(data)
    return str(serve(partial(Files, directory=str(tmp_path))))


def color(table: MediaTable, number: int) -> Any:
    return load_image(f"{number}.png", table).getpixel((0, 0))


@pytest.mark.slow
def test_many_threads_read_side_by_side(many: str) -> None:
    numbers = [n % 40 if n % 2 else 7 for n in range(400)]  # half of them the same file
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(partial(color, media(many)), numbers))
    assert found == [(n, 0, 0) for n in numbers]


def test_a_fork_of_a_process_that_has_read_it_reads_it_too(many: str) -> None:
    table = media(many)
    assert color(table, 3) == (3, 0, 0)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(color, (table, 5)) == (5, 0, 0)
        # Not terminated: where Ray has run before, a fork has its handler of SIGTERM, which waits.
        pool.close()
        pool.join()


def test_no_more_is_kept_than_max_bytes_whatever_the_store_says(serve: Any) -> None:
    message = refused("a.png", media(serve(Faulty), max_bytes=1000))
    assert "media.max_bytes is 1000" in message


def test_a_store_s_error_is_reported_without_its_secrets(serve: Any) -> None:
    root = serve(Faulty)
    message = refused(f"{root}/500.png?token=secret", media(root))
    assert message.startswith(f"{root}/500.png?…: can't be read from media.root {root}: ")
    assert "500" in message.removeprefix(f"{root}/500.png")
    with pytest.raises(MediaError, match="can't be read"):
        load_text("500.txt", media(root))


@pytest.mark.parametrize(
    "text",
    [
        "401 for https://me:secret@host/a.png",
        "403, url='https://host/a.png?X-Amz-Signature=secret&a=secret' refused",
        "refused with url: /a.png?sig=secret (Caused by a timeout)",
        "sftp://me:se@cret%40secret@host:22/x",
    ],
)
def test_an_error_s_text_loses_what_a_url_carries(text: str) -> None:
    assert "secret" not in failure(OSError(text), ROOT)


# A root that can't be used


def job(**tables: Any) -> JobConfig:
    made = {"prompt": {"user": "?", "images": ["{{ file }}"]}, "media": {"root": ROOT}}
    return dry_runs.job(**{**made, **tables})


def complaint(root: str, **tables: Any) -> str:
    with pytest.raises(JobError) as caught:
        PromptRenderer(job(media={"root": root}, **tables))
    message = str(caught.value)
    assert "secret" not in message
    return message


@pytest.mark.parametrize("package", ["s3fs", "gcsfs"])
def test_a_missing_package_is_named_before_the_first_row(package: str, monkeypatch: Any) -> None:
    scheme = {"s3fs": "s3", "gcsfs": "gs"}[package]
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    root = f"{scheme}://bucket/images"
    message = complaint(root)
    assert message.startswith(f"media.root: {root} can't be opened: ")
    assert package in message
    assert "pip install -e " in message
    assert "[remote]" in message
    assert package in refused("a.png", media(root))
    texts = {"user": "{{ t }}", "texts": {"t": "{{ file }}"}}
    assert message == complaint(root, prompt=texts)
    PromptRenderer(job(media={"root": root}, prompt={"user": "no file at all"}))
    with pytest.raises(InputError, match=r"pip install .*\[remote\]"):
        next(iter(read_rows(job(input={"path": f"{root}/rows.jsonl"}).input)))


def test_a_scheme_that_fsspec_does_not_know_gets_a_near_one() -> None:
    assert "Protocol not known: s4; did you mean s3://?" in complaint("s4://bucket")
    assert "did you mean memory://?" in complaint("Memory://bucket")


def test_a_password_in_the_root_is_refused_and_not_repeated() -> None:
    for root in ("sftp://me:secret@host/images", "zip://a::sftp://me:secret@host/a.zip"):
        assert "put it into the environment variable FSSPEC_SFTP_PASSWORD" in complaint(root)
    for root in ("sftp://me@host/images", "abfs://images@a.b.net/c", "zip://a::s3://b/c.zip"):
        assert job(media={"root": root}).media.root == root


# A run


def test_a_run_answers_what_is_there_and_says_why_the_rest_is_not(tmp_path: Path) -> None:
    names = ["a.png", "none.png", "../beside.png"]
    made = job(output={"dir": str(tmp_path)})
    processor = ProductionBatchProcessor(made, quiet=True)
    records = processor.process([{"file": name} for name in names]).records()
    assert [(r["error"] or {}).get("kind") for r in records] == [None, "media", "media"]
    assert data_in(report(made.folder).path)["pictures"] == []  # a reader fetches nothing
