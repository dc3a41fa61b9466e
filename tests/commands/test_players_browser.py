"""The players of a row's clips in a real browser, on a server and in a report: sound plays from a segment's time, and a
video shows a frame of its middle before it is played."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tomlkit

from batchkit.commands.demo_digits import make_recording, write_wav
from tests.support import clips
from tests.support.browser import Open, Opened
from tests.support.own_process import batchkit
from tests.support.rows import write_jsonl
from tests.support.view_server import Viewed, viewing
from tests.support.waiting import until

pytestmark = [pytest.mark.browser, pytest.mark.release]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of transcripts, and one over two videos, of which a browser plays the first; with a report of each."""
    place = tmp_path_factory.mktemp("players")
    write_wav(place / "talk.wav", make_recording(Random(1), 12).samples)
    frames = clips.frames(16, size=(128, 64))
    clips.write(place, "film.webm", clips.video(frames, format="webm", codec="libvpx"))
    clips.write(place, "film.avi", clips.video(frames, format="avi", codec="mpeg4"))
    heard = {"task": "transcribe", "prompt": {"audios": ["{{ clip }}"]}}
    seen = {"prompt": {"user": "What happens? {{ video }}", "videos": ["{{ clip }}"]}}
    _run(place, "heard", ["talk.wav"], speech={"part_seconds": 8}, **heard)
    _run(place, "seen", ["film.webm", "film.avi"], **seen)
    return place


def _run(place: Path, name: str, files: list[str], **tables: Any) -> None:
    write_jsonl(place / f"{name}.jsonl", [{"clip": file} for file in files])
    job = {
        "name": name,
        "input": {"path": f"{name}.jsonl", "id": "clip"},
        "engine": {"kind": "dry-run"},
        **tables,
    }
    (place / f"{name}.toml").write_text(tomlkit.dumps(job), encoding="utf-8")
    for command in (["run"], ["report", "--output", f"{name}.html"]):
        done = batchkit(command[0], f"{name}.toml", *command[1:], cwd=place)
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[Viewed]:
    with viewing("output", cwd=place) as view:
        yield view


@pytest.fixture(params=["server", "file"])
def opened(request: pytest.FixtureRequest, place: Path, server: Viewed, visit: Open) -> Any:
    def page(run: str, row: str) -> Opened:
        file = (place / f"{run}.html").as_uri()
        found = visit(f"{server.url}run/{run}" if request.param == "server" else file)
        found.shows(row)
        return found

    return page


def _of(page: Opened, code: str, kind: str) -> Any:
    return page.page.locator(f".clip {kind}").first.evaluate(f"player => player.{code}")


def test_a_segment_s_time_plays_its_place(opened: Any) -> None:
    page = opened("heard", "talk.wav")
    until(lambda: _of(page, "duration", "audio") == pytest.approx(12, abs=0.1))
    page.page.locator(".segments button").last.click()
    until(lambda: _of(page, "currentTime", "audio") > 4)
    assert _of(page, "error", "audio") is None


def test_a_video_shows_a_frame_of_its_middle_and_plays(opened: Any) -> None:
    page = opened("seen", "film.webm")
    until(lambda: _of(page, "duration", "video") == pytest.approx(2, abs=0.2))
    size = page.page.locator(".clip video").evaluate(
        "player => new Promise(done => { const image = new Image();"
        " image.onload = () => done([image.width, image.height]); image.src = player.poster; })"
    )
    assert size == [128, 64]
    page.page.locator(".clip video").evaluate("player => { player.muted = true; player.play(); }")
    until(lambda: _of(page, "currentTime", "video") > 0.2)


def test_a_video_that_no_browser_plays_has_its_frame(opened: Any) -> None:
    page = opened("seen", "film.webm")
    page.page.locator("#list .item").last.click()
    page.shows("film.avi")
    page.sees(".clip .missing", "browsers don't play")
    page.page.locator(".clip img").wait_for()
    until(lambda: page.page.locator(".clip img").evaluate("image => image.naturalWidth") == 128)
