"""What a run folder that someone else made may have its readers do: fetch nothing, open nothing but what they name,
take no time."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tomlkit

from tests.support.command_line import batchkit
from tests.support.dry_runs import RUN, changed_job, finished, run, write_job, write_rows
from tests.support.images import png
from tests.support.own_process import begin
from tests.support.view_server import viewing

pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.slow]

READERS = ("show", "report", "verify", "status")
NOT_OPENED = "not opened: the job file of this run was not found"
NOT_FETCHED = "not fetched: reading a run downloads nothing"
PARTS = ("/rows", "/rows/0", "/prompts?rows=0,1", "/about")
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def url() -> Iterator[str]:
    """At which nobody may ask."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A folder outside of the job file's, with what nobody may see."""
    folder = tmp_path / "secret"
    folder.mkdir()
    (folder / "image.png").write_bytes(png())
    (folder / "text.txt").write_text("hush-hush {{ q }}")
    (folder / "rows.jsonl").write_text('{"q": "hush-hush"}\n')
    return folder


def read_by_all(*options: str | Path) -> str:
    """What the readers print, and what the page shows of row 0."""
    said = ""
    for reader in READERS:
        began = time.monotonic()
        done = batchkit(reader, RUN, *(options if reader != "status" else ()))
        assert time.monotonic() - began < 60
        said += done.stdout + done.stderr
    with viewing(RUN, *options, cwd=Path.cwd()) as view:
        row = view.client.get("/api/runs/a/rows/0").json()
        said += str(row)
        for more in ("", "/a/prompts?rows=0", "/a/about"):
            said += view.client.get(f"/api/runs{more}").text
        for image in row.get("prompt", {}).get("images", ()):
            answer = view.client.get(image)
            said += f"image {answer.status_code} {'' if answer.is_success else answer.text}"
    page = RUN / "report.html"
    return said + (page.read_text() if page.exists() else "")


FOREIGN: dict[str, tuple[dict[str, Any], str]] = {
    "input": ({"input": {"path": "SECRET/rows.jsonl"}}, NOT_OPENED),
    "input that is computed": ({"input": {"path": ENDLESS}}, NOT_OPENED),
    "input anywhere": ({"input": {"path": "/**/no-such-file"}}, NOT_OPENED),
    "input at a URL": ({"input": {"path": "URL/rows.jsonl"}}, NOT_FETCHED),
    "every file as media": (
        {"media": {"root": "/"}, "prompt": {"images": ["SECRET/image.png"]}},
        NOT_OPENED,
    ),
    "text": ({"media": {"root": "/"}, "prompt": {"texts": {"q": "SECRET/text.txt"}}}, NOT_OPENED),
    "image at a URL": (
        {"media": {"allow_urls": ["127.0.0.1"]}, "prompt": {"images": ["URL/image.png"]}},
        NOT_FETCHED,
    ),
    "prompt": ({"prompt": {"user_file": "SECRET/text.txt"}}, NOT_OPENED),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_no_file_is_opened_and_nothing_is_fetched(case: str, url: str, secret: Path) -> None:
    tables, problem = FOREIGN[case]
    finished(1)
    Path("job.toml").unlink()
    if case == "prompt":
        path = RUN / "job.toml"
        path.write_text(path.read_text().replace('user = "{{ q }}"', ""))
    written = tomlkit.dumps(tables).replace("SECRET", str(secret)).replace("URL", url)
    changed_job(**tomlkit.loads(written).unwrap())
    said = read_by_all(*(["--media", Path.cwd()] if case == "image at a URL" else []))
    assert problem in said
    assert "hush-hush" not in said
    assert "image 200" not in said
    assert ";base64,U" not in said  # a WebP image


def test_files_are_opened_where_the_job_file_is_or_where_the_reader_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, away = tmp_path / "home", tmp_path / "away"
    home.mkdir()
    away.mkdir()
    monkeypatch.chdir(home)
    write_rows([{"q": "question 0", "file": "0.png"}])
    Path("0.png").write_bytes(png())
    write_job(prompt={"images": ["{{ file }}"]})
    run()
    assert "user: [image]question 0" in read_by_all()
    shutil.copytree("output", away / "output")
    Path("job.toml").unlink()
    monkeypatch.chdir(away)
    assert NOT_OPENED in (said := read_by_all())
    assert "user: [image]question 0" not in said
    said = read_by_all("--media", home)
    assert "user: [image]question 0" in said
    assert "image 0.png, 4 × 2" in said
    assert "image 200" in said
    assert ";base64,U" in said
    assert "not opened" not in said


@pytest.mark.release
def test_a_template_has_five_seconds_and_the_page_ends_while_one_renders() -> None:
    finished(3)
    changed_job(prompt={"user": ENDLESS})
    said = read_by_all()
    assert said.count("the prompt's template takes longer than 5 s") >= 3
    process = begin("view", RUN, "--port", "0", "--no-browser", cwd=Path.cwd())
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{address}api/runs/a/rows/1", timeout=1.5, trust_env=False)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert stderr == ""


def test_a_pipe_in_place_of_a_file_keeps_no_page_waiting() -> None:
    names = ("results.jsonl", "job.toml", "steps.jsonl", "scores.jsonl", ".lock")
    for number, name in enumerate(names):
        finished(2, name=f"r{number}")
        file = Path(f"output/r{number}", name)
        file.unlink(missing_ok=True)
        os.mkfifo(file)
    paths = [f"runs/r{number}{more}" for number in range(len(names)) for more in ("", *PARTS)]
    with viewing("output", cwd=Path.cwd()) as view:
        for path in ("runs", *paths):
            assert view.client.get(f"/api/{path}").status_code in (200, 409), path
