"""The demo speech model, a small Whisper that was trained to hear digits, through vLLM and vLLM's own server: every digit
once and in its place, however long the recording; and speech that a model leaves out is noticed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from batchkit.config.loading import load_job
from batchkit.storage.log import RESULTS, STEPS
from batchkit.storage.newest_lines import read_newest
from batchkit.storage.starts import read_history
from tests.support.forks import Fork
from tests.support.own_process import batchkit
from tests.support.rows import read_jsonl, write_jsonl
from tests.support.vllm_server import serving

pytestmark = pytest.mark.vllm

JOB = Path(__file__).parents[2] / "jobs/transcribe.toml"
_NEAR_S = 0.2


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 40 recordings and one of ten minutes, of which the model's training had none."""
    place = tmp_path_factory.mktemp("speech")
    assert batchkit("demo", "digits", "digits", cwd=place).returncode == 0
    return place


@pytest.fixture(scope="module")
def shipped(place: Path) -> list[dict[str, Any]]:
    """The records of the job as it ships."""
    return _records(place, "transcribe")


def _records(place: Path, name: str, *settings: str) -> list[dict[str, Any]]:
    """Of a run, whose summary counts those that lack some of the sound."""
    words = [word for setting in (f"name={name}", *settings) for word in ("--set", setting)]
    done = batchkit("run", JOB, *words, cwd=place, start=Fork)
    assert done.returncode == 0, done.stderr
    records = [*read_newest(place / "output" / name / RESULTS)]
    assert json.loads(done.stdout)["uncovered"] == sum("coverage" in record for record in records)
    return records


def _rows(place: Path) -> list[dict[str, Any]]:
    return read_jsonl(place / "digits/recordings.jsonl")


def _is_in_place(segment: Mapping[str, Any], times: Sequence[float]) -> bool:
    found = segment["start"], segment["end"]
    return all(abs(at - right) < _NEAR_S for at, right in zip(found, times, strict=True))


def test_ten_minutes_are_heard_in_parts_each_digit_once_and_in_its_place(
    place: Path, shipped: list[dict[str, Any]]
) -> None:
    row, record = _rows(place)[-1], shipped[-1]
    assert record["seconds"] == 600
    assert record["generations"] >= 75
    assert record["text"] == row["text"]
    assert "coverage" not in record
    pairs = zip(record["segments"], row["times"], strict=True)
    assert all(_is_in_place(segment, times) for segment, times in pairs)
    lines = read_jsonl(place / "output/transcribe" / STEPS)
    assert sum(line["id"] == "41" for line in lines) == record["generations"]


def test_held_out_recordings_are_heard_right(place: Path, shipped: list[dict[str, Any]]) -> None:
    rows = _rows(place)[:-1]
    n_digits = sum(len(row["times"]) for row in rows)
    wrong = sum(
        abs(len(record["segments"]) - len(row["times"]))
        + sum(
            segment["text"] != digit or not _is_in_place(segment, times)
            for segment, digit, times in zip(
                record["segments"], row["text"].split(), row["times"], strict=False
            )
        )
        for row, record in zip(rows, shipped, strict=False)
    )
    print(f"{n_digits - wrong} of {n_digits} digits")
    assert wrong <= 0.05 * n_digits
    assert sum(record["scores"]["wer"] for record in shipped) / len(shipped) < 0.05


def test_parts_that_are_heard_again_alone_have_the_same_text(place: Path) -> None:
    _records(place, "checked", "self_check.rows=6", "input.limit=12")
    checked = read_history(place / "output/checked").self_checks
    assert (checked.rows, checked.different) == (6, 0), checked


@pytest.mark.release
def test_speech_that_a_model_leaves_out_is_asked_again_and_then_named(place: Path) -> None:
    """Its answers end after three digits: those behind are lost, unless they are asked for again."""
    records = _records(place, "cut", "sampling.max_tokens=9", "input.limit=40")

    for row, record in zip(_rows(place), records, strict=False):
        heard = [(segment["start"], segment["end"]) for segment in record["segments"]]
        lost = [
            (start, end)
            for start, end in row["times"]
            if not any(a < (start + end) / 2 < b for a, b in heard)
        ]
        missing_s = sum(end - start for start, end in lost)
        found = record.get("coverage") or {"missing_s": 0, "gaps": []}
        assert found["missing_s"] == pytest.approx(missing_s, abs=0.05 + 0.06 * len(lost))
        assert len(found["gaps"]) == len(lost)
    lines = read_jsonl(place / "output/cut" / STEPS)
    again = [line for line in lines if line["step"] == "again"]
    assert 20 < len(again) < len(lines) / 2
    assert any("coverage" in record for record in records)
    whole = {record["index"] for record in records if "coverage" not in record}
    assert whole & {line["index"] for line in again}


def test_vllm_s_server_hears_the_same(
    place: Path, shipped: list[dict[str, Any]], tmp_path: Path
) -> None:
    job = load_job(JOB)
    model = Path(job.engine.model_source)
    options = {**job.engine.options, "kv_cache_memory_bytes": 2**28}
    with serving(model, options, tmp_path / "log") as url:
        settings = ["engine.kind=openai-server", f"engine.base_url={url}", "engine.options={}"]
        settings += [f"engine.model={model}", "input.limit=12", "sampling={temperature=0}"]
        served = _records(place, "served", *settings)
    for ours, theirs in zip(shipped, served, strict=False):
        assert theirs["text"] == ours["text"]
        assert theirs["segments"] == [
            {**its, **{at: pytest.approx(its[at], abs=0.03) for at in ("start", "end")}}
            for its in ours["segments"]
        ]


def test_validate_opens_every_recording_and_counts_its_prompt(place: Path) -> None:
    (place / "digits/broken.wav").write_bytes(b"RIFF")
    row = {"id": 99, "recording": "broken.wav", "text": ""}
    write_jsonl(place / "digits/broken.jsonl", [*_rows(place)[:2], row])
    args = "validate", JOB, "--set", "input.path=digits/broken.jsonl", "--json"
    found = json.loads(batchkit(*args, cwd=place, start=Fork).stdout)
    assert (found["ok"], found["failed_by_kind"]) == (2, {"media": 1})
    assert found["prompt_tokens"]["max"] == 3
