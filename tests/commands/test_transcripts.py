"""What is made of transcripts: subtitles, error rates, and players in ``view``, ``show`` and ``report``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tomlkit

from batchkit.commands.demo_digits import make_recording, write_wav
from batchkit.config.tables import JobConfig
from batchkit.scoring import Scoring
from tests.support.command_line import batchkit
from tests.support.pages import data_in
from tests.support.rows import write_jsonl
from tests.support.view_server import Viewed, viewing

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run over a folder's recordings; one row's is outside of it, and one's is a web page."""
    place = tmp_path_factory.mktemp("transcripts")
    (place / "sound").mkdir()
    for n, seconds in enumerate((3, 12)):
        write_wav(place / f"sound/{n}.wav", make_recording(Random(n), seconds).samples)
    write_wav(place / "outside.wav", make_recording(Random(9), 2).samples)
    (place / "sound/page.wav").write_text("<html><script>alert(1)</script>")
    names = ["0.wav", "1.wav", "../outside.wav", "page.wav"]
    rows = [
        {"id": f"talk/{n}", "file": name, "said": "hello there"} for n, name in enumerate(names)
    ]
    write_jsonl(place / "rows.jsonl", rows)
    job = {
        "name": "run",
        "task": "transcribe",
        "input": {"path": "rows.jsonl", "id": "id"},
        "prompt": {"audios": ["{{ file }}"]},
        "media": {"root": "sound"},
        "speech": {"part_seconds": 8, "language": "en"},
        "engine": {"kind": "dry-run"},
        "output": {"dir": str(place / "output")},
        "scoring": {"scorers": ["wer", "cer"], "reference": "said"},
    }
    (place / "job.toml").write_text(tomlkit.dumps(job), encoding="utf-8")
    done = batchkit("run", place / "job.toml")
    assert (done.exit_code, done.json["ok"]) == (3, 2), done.stderr
    return place


@pytest.fixture(scope="module")
def view(place: Path) -> Iterator[Viewed]:
    with viewing("output", cwd=place) as view:
        yield view


def test_each_transcript_is_a_file_of_subtitles(place: Path) -> None:
    job = place / "job.toml"
    batchkit("export", job, "--srt", "--vtt", place / "captions").ok()
    folder = place / "output/run/subtitles"
    assert sorted(path.name for path in folder.iterdir()) == ["talk_0.srt", "talk_1.srt"]
    text = "dry-run: no model answered row 0"
    assert (folder / "talk_0.srt").read_text() == f"1\n00:00:00,000 --> 00:00:03,000\n{text}\n"
    captions = (place / "captions/talk_1.vtt").read_text()
    assert captions.startswith("WEBVTT\n\n1\n00:00:00.000 --> 00:00:0")
    assert captions.count("-->") == 2
    taken = batchkit("export", job, "--srt", job)
    assert "job.toml: is a file; name a folder" in taken.stderr


@pytest.mark.parametrize(
    ("language", "said", "right", "wer", "cer"),
    [
        ("en", "Hello, Mr. Smith!", "hello mister smith", 0.0, 0.0),
        ("en", "I have twenty one cats", "I've 21 cats", 0.0, 0.0),
        ("de", "Das ist gut", "das war gut", 1 / 3, 3 / 11),
        ("de", "", "das war gut", 1.0, 1.0),
        ("de", "a b c d", "a", 3.0, 6.0),
        ("de", "a", "?!", None, None),
    ],
)
def test_error_rates_are_over_normalised_words(
    language: str, said: str, right: str, wer: float | None, cer: float | None
) -> None:
    job = JobConfig(
        task="transcribe",
        engine={"kind": "dry-run", "model": "m"},
        speech={"language": language},
        scoring={"scorers": ["wer"], "reference": "right", "rules": [{"scorers": ["wer", "cer"]}]},
    )
    found = Scoring(job.scoring).score(said, {"right": right}, "1").scores
    assert found == {
        name: None if score is None else pytest.approx(score)
        for name, score in (("wer", wer), ("cer", cer))
    }


def test_a_run_of_transcripts_has_their_error_rates(place: Path) -> None:
    table = batchkit("report", place / "output/run", "--json").json
    assert table["overall"]["n"] == 2
    assert table["overall"]["wer"] == pytest.approx(100 * (7 + 14) / 2 / 2)


def _clips(view: Viewed, row: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = view.get(f"runs/run/rows/{row}")["prompt"]["clips"]
    return found


def test_a_row_of_view_plays_its_clip_by_ranges(place: Path, view: Viewed) -> None:
    whole = (place / "sound/1.wav").read_bytes()
    (clip,) = _clips(view, 1)
    assert clip == {"kind": "audio", "src": "/api/runs/run/rows/1/clips/0"}

    answer = view.client.get(clip["src"])
    assert answer.content == whole
    assert answer.headers["content-type"] == "audio/wav"
    assert answer.headers["accept-ranges"] == "bytes"
    size = len(whole)
    for asked, part in {"0-99": whole[:100], "1000-": whole[1000:], "-10": whole[-10:]}.items():
        answer = view.client.get(clip["src"], headers={"range": f"bytes={asked}"})
        assert answer.status_code == 206
        assert answer.content == part
        assert answer.headers["content-range"].endswith(f"/{size}")
    beyond = view.client.get(clip["src"], headers={"range": f"bytes={size}-"})
    assert (beyond.status_code, beyond.content) == (416, b"")
    assert beyond.headers["content-range"] == f"bytes */{size}"


def test_only_a_clip_that_the_row_names_below_the_root_is_served(view: Viewed) -> None:
    assert view.client.get("/api/runs/run/rows/1/clips/1").status_code == 404
    outside = view.client.get(_clips(view, 2)[0]["src"])
    assert outside.status_code == 404
    assert "outside media.root" in outside.json()["error"]
    page = view.client.get(_clips(view, 3)[0]["src"])
    assert page.status_code == 404
    assert "browsers don't play" in page.json()["error"]


def test_a_report_holds_short_clips_and_show_names_them(place: Path) -> None:
    batchkit("report", place / "output/run", "--output", place / "page.html").ok()
    rows = data_in(place / "page.html")["rows"]
    (clip,) = rows[0]["prompt"]["clips"]
    assert clip["src"].startswith("data:audio/wav;base64,UklGR")
    assert "outside media.root" in rows[2]["prompt"]["clips"][0]["problem"]
    shown = batchkit("show", place / "output/run").stdout
    assert "audio 1.wav\n(transcribe), en" in shown
    assert "12.0 s of sound, 2 generations" in shown
