"""Whisper tiny.en and base with real weights: speech of eSpeak NG, whose words and times are known."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support import own_process
from tests.support.espeak import Spoken, record
from tests.support.forks import Fork
from tests.support.model_runs import OUTPUT, newest, write_job
from tests.support.prose import GERMAN, sentences
from tests.support.real_models import real_model

# Each model transcribes twelve minutes of sound, which takes minutes on two busy cores.
pytestmark = [pytest.mark.real, pytest.mark.timeout(1500)]

MODELS = ["tiny.en", "base"]
MOST_WER = {"tiny.en": 30, "base": 10}
NEAR_S = 0.5
SILENCE_S, MARGIN_S = 20.0, 1.0
NOISE = 30  # 61 dB below full scale
OPTIONS = {
    "dtype": "float32",
    "max_model_len": 448,
    "max_num_seqs": 8,
    "limit_mm_per_prompt": {"audio": 1},
    "kv_cache_memory_bytes": 512 * 2**20,
    "enforce_eager": True,
}


class Run(NamedTuple):
    """A run of a model over all recordings, and its records by row id."""

    folder: Path
    records: dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for WAV files."""
    return tmp_path_factory.mktemp("recordings")


@pytest.fixture(scope="module")
def spoken(recordings: Path) -> dict[str, Spoken]:
    """What each recording says: ten minutes, two with a silence in the middle, and one in German."""
    around: list[str | float] = [*sentences(6, first=500), SILENCE_S, *sentences(6, first=600)]
    return {
        "long": record(recordings / "long.wav", sentences(120)),
        "pause": record(recordings / "pause.wav", around),
        "noise": record(recordings / "noise.wav", around, noise=NOISE),
        "german": record(recordings / "german.wav", GERMAN, voice="de"),
    }


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def run(
    model: str,
    recordings: Path,
    spoken: dict[str, Spoken],
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:
    """Base has to find the language itself; tiny.en knows only English."""
    folder = tmp_path_factory.mktemp("run")
    rows = [
        {"id": name, "recording": f"{name}.wav", "text": said.text}
        for name, said in spoken.items()
        if model == "base" or name != "german"
    ]
    write_job(
        folder,
        rows,
        task="transcribe",
        input={"path": "rows.jsonl", "id": "id"},
        prompt={"audios": ["{{ recording }}"]},
        media={"root": str(recordings)},
        engine={"model": str(real_model(f"whisper-{model}")), "options": OPTIONS},
        sampling={"temperature": 0, "max_tokens": 400},
        scoring={
            "reference": "text",
            "scorers": [{"wer": {"normalizer": "english"}}],
            "group_by": "id",
        },
    )
    done = own_process.batchkit("run", "job.toml", cwd=folder, start=Fork, timeout_s=1200)
    assert done.returncode == 0, done.stderr
    return Run(folder, {record["id"]: record for record in newest(folder)})


def share_near(found: Sequence[float], known: Sequence[float]) -> float:
    """Return the share of the times ``found`` that are near one of the ``known`` times."""
    near = [min(abs(time - it) for it in known) <= NEAR_S for time in found]
    return sum(near) / len(near)


def words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def test_ten_minutes_are_transcribed(model: str, run: Run) -> None:
    scored = own_process.batchkit("score", OUTPUT, "--json", cwd=run.folder)
    found = json.loads(scored.stdout)["metrics"]
    print(f"{model}: WER", {name: round(group["wer"], 2) for name, group in found.items()})
    assert run.records["long"]["seconds"] >= 600
    assert not any("coverage" in transcript for transcript in run.records.values())
    assert found["long"]["wer"] < MOST_WER[model]


def test_segments_have_the_times_of_sentences(
    model: str, run: Run, spoken: dict[str, Spoken]
) -> None:
    """Whisper also begins a segment within a long sentence, so only segments with the first or last two words of a
    sentence count."""
    segments, said = run.records["long"]["segments"], spoken["long"]
    assert len(segments) >= len(said.times) / 2
    first = {tuple(words(sentence)[:2]) for sentence in said.sentences}
    last = {tuple(words(sentence)[-2:]) for sentence in said.sentences}
    starts = [it["start"] for it in segments if tuple(words(it["text"])[:2]) in first]
    ends = [it["end"] for it in segments if tuple(words(it["text"])[-2:]) in last]
    near_starts = share_near(starts, [start for start, _ in said.times])
    near_ends = share_near(ends, [end for _, end in said.times])
    print(f"{model}: {len(segments)} segments")
    print(
        f"{near_starts:.1%} of {len(starts)} starts, {near_ends:.1%} of {len(ends)} ends are near"
    )
    assert min(len(starts), len(ends)) >= 0.8 * len(said.times)
    assert near_starts >= 0.9
    assert near_ends >= 0.9


def test_subtitles_are_in_order(run: Run) -> None:
    done = own_process.batchkit("export", OUTPUT, "--srt", "subtitles", cwd=run.folder)
    assert done.returncode == 0, done.stderr
    for name, transcript in run.records.items():
        cues = (run.folder / f"subtitles/{name}.srt").read_text().strip().split("\n\n")
        assert [cue.split("\n")[0] for cue in cues] == [str(n + 1) for n in range(len(cues))]
        times = [time for cue in cues for time in cue.split("\n")[1].split(" --> ")]
        assert all(re.fullmatch(r"\d\d:\d\d:\d\d,\d{3}", time) for time in times)
        assert times == sorted(times)
        texts = [" ".join(cue.split("\n")[2:]) for cue in cues]
        assert " ".join(texts) == transcript["text"]


@pytest.mark.parametrize("name", ["pause", "noise"])
def test_a_silence_gets_no_words(
    name: str, model: str, run: Run, spoken: dict[str, Spoken]
) -> None:
    segments, times = run.records[name]["segments"], spoken[name].times
    before, after = times[5][1] + MARGIN_S, times[6][0] - MARGIN_S
    assert after - before > SILENCE_S - 2 * MARGIN_S
    assert [it for it in segments if it["start"] < after and it["end"] > before] == []
    sides = [
        " ".join(it["text"] for it in segments if (it["start"] < before) is is_before)
        for is_before in (True, False)
    ]
    said = [spoken[name].sentences[:6], spoken[name].sentences[6:]]
    for side, sentences_of_side in zip(sides, said, strict=True):
        known, heard = words(" ".join(sentences_of_side)), words(side)
        n_same = sum(its.size for its in SequenceMatcher(None, known, heard).get_matching_blocks())
        assert n_same >= (1 - MOST_WER[model] / 100) * len(known)


@pytest.mark.parametrize("model", ["base"], indirect=True)
def test_the_language_is_detected(run: Run) -> None:
    found = {name: record["language"] for name, record in run.records.items()}
    assert found == {"long": "en", "pause": "en", "noise": "en", "german": "de"}
