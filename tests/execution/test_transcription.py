"""``task = "transcribe"`` without a model: how a recording is cut, and how what was heard of its parts is joined."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import tomlkit

from batchkit.commands.demo_digits import SAMPLE_RATE, make_recording, write_wav
from batchkit.config.loading import make_job
from batchkit.errors import JobError
from batchkit.execution.rollouts.transcription import coverage_of, joined, segments_in
from batchkit.rendering.media.sound import Sound, SoundPart, Span
from batchkit.storage.log import RESULTS, STEPS
from batchkit.storage.newest_lines import read_newest
from batchkit.types import Audio, Segment
from tests.support.own_process import batchkit
from tests.support.rows import read_jsonl, write_jsonl

JOB: dict[str, Any] = {
    "name": "run",
    "task": "transcribe",
    "input": {"path": "rows.jsonl"},
    "prompt": {"audios": ["{{ file }}"]},
    "speech": {"part_seconds": 8},
    "engine": {"kind": "dry-run"},
}


def _sound(samples: Any) -> Sound:
    return Sound(Audio(np.asarray(samples, np.float32), SAMPLE_RATE))


def _segment(start: float, end: float, text: str) -> Segment:
    return Segment(start=start, end=end, text=text)


@pytest.mark.parametrize("seed", range(5))
def test_a_recording_is_cut_in_silence_and_nothing_of_it_is_left_out(seed: int) -> None:
    made = make_recording(Random(seed), 95)

    parts = _sound(made.samples).parts(8, 0.5)

    assert parts[0].own.start == 0
    assert parts[-1].own.end == 95
    assert all(a.own.end == b.own.start for a, b in pairwise(parts))
    assert all(part.heard.seconds <= 8 and not part.is_cut for part in parts)
    for digit in made.digits:
        whole = [it for it in parts if it.own.start <= digit.start and digit.end <= it.own.end]
        middle = (digit.start + digit.end) / 2
        heard = [it for it in parts if it.heard.start < middle < it.heard.end]
        assert len(whole) == len(heard) == 1


def test_the_noise_of_a_recording_is_no_sound_and_every_digit_is() -> None:
    for seed in range(5):
        made = make_recording(Random(seed), 60)
        spans = _sound(made.samples).without((), Span(0, 60))
        assert len(spans) == len(made.digits)
        for span, digit in zip(spans, made.digits, strict=True):
            assert span == pytest.approx((digit.start, digit.end), abs=0.04)


def test_a_recording_without_silence_is_cut_with_an_overlap() -> None:
    at = np.arange(70 * SAMPLE_RATE) / SAMPLE_RATE
    parts = _sound(0.3 * np.sin(2 * np.pi * 440 * at)).parts(30, 0.5)

    assert [part.is_cut for part in parts] == [True] * (len(parts) - 1) + [False]
    assert all(part.heard.seconds <= 30 for part in parts)
    for part, following in pairwise(parts):
        assert part.heard.end == pytest.approx(part.own.end + 0.5)
        assert following.heard.start == pytest.approx(following.own.start - 0.5)


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        ((2, 28), (9.9, 20.1)),
        ((2, 15), (9.9, 15)),
        ((15, 28), (15, 20.1)),
        ((9.2, 20.8), (9.2, 20.8)),  # Whisper's times are kept if they are near
        ((2, 8), (2, 8)),
    ],
)
@pytest.mark.parametrize("noise", [0, 0.001])
def test_long_silence_at_the_ends_of_a_segment_is_no_part_of_it(
    noise: float, span: tuple[float, float], expected: tuple[float, float]
) -> None:
    at = np.arange(30 * SAMPLE_RATE) / SAMPLE_RATE
    tone = 0.3 * np.sin(2 * np.pi * 440 * at) * ((at >= 10) & (at < 20))
    sound = _sound(tone + np.random.default_rng(0).normal(0, noise, len(at)))
    assert sound.without_silent_ends(*span) == pytest.approx(expected)


@pytest.mark.parametrize("seconds", [0.01, 5, 30])
def test_a_short_recording_is_one_part(seconds: float) -> None:
    (part,) = _sound(np.zeros(round(seconds * SAMPLE_RATE))).parts(30, 0.5)
    assert part.heard == part.own == pytest.approx((0, seconds))


@pytest.mark.parametrize(
    ("text", "reason", "expected"),
    [
        ("<|0.00|> One.<|1.20|><|1.50|> Two.<|2.00|>", "stop", [(10, 11.2, "One."), (11.5, 12, "Two.")]),
        ("<|en|><|0.40|>One", "stop", [(10.4, 18, "One")]),
        ("<|0.40|>One", "length", [(10.4, 10.4, "One")]),
        (" One <|0.80|>", "stop", [(10, 10.8, "One")]),
        ("<|7.00|>One<|99.00|>", "stop", [(17, 18, "One")]),
        ("<|3.00|>One<|2.00|>", "stop", [(13, 13, "One")]),
        (" One, two. ", "stop", [(10, 18, "One, two.")]),
        ("<|0.00|><|8.00|>", "stop", []),
        ("<|nospeech|>", "stop", []),
    ],
)  # fmt: skip
def test_time_stamps_make_segments(
    text: str, reason: str, expected: list[tuple[float, float, str]]
) -> None:
    found = segments_in(text, Span(10, 18), reason)
    assert [(it["start"], it["end"], it["text"]) for it in found] == [
        (pytest.approx(start), pytest.approx(end), text) for start, end, text in expected
    ]


def test_what_two_parts_hear_is_there_once() -> None:
    parts = [SoundPart(Span(0, 10), Span(0, 11), True), SoundPart(Span(10, 20), Span(9, 20))]
    left = [_segment(0, 4, "It was late."), _segment(8, 10.9, "She said, go home")]
    right = [_segment(9, 10.8, "go home now"), _segment(12, 14, "And left.")]

    found = joined(parts, [left, [_segment(10.1, 11, "Go home, now."), right[1]]])
    texts = [segment["text"] for segment in found]
    assert texts == ["It was late.", "She said, go home", "now.", "And left."]
    assert [it["text"] for it in joined(parts, [left, right])] == [*texts[:2], "And left."]


@pytest.mark.parametrize(
    ("is_cut", "expected"),
    [
        (False, [(8, 10), (10, 13)]),  # the middle of the silence between the chunks
        (True, [(8, 10.5), (10.5, 13)]),
    ],
)
def test_segments_of_two_parts_do_not_overlap(
    is_cut: bool, expected: list[tuple[float, float]]
) -> None:
    parts = [SoundPart(Span(0, 10), Span(0, 10.5), is_cut), SoundPart(Span(10, 20), Span(9.5, 20))]
    found = joined(parts, [[_segment(8, 10.5, "One.")], [_segment(9.5, 13, "Two.")]])
    assert [(it["start"], it["end"]) for it in found] == expected


def test_sound_without_text_is_named_with_its_seconds() -> None:
    made = make_recording(Random(3), 40)
    sound = _sound(made.samples)
    segments = [_segment(it.start, it.end, it.digit) for it in made.digits]
    lost, last = made.digits[7], made.digits[-1]

    assert coverage_of(segments, sound) is None
    found = coverage_of(
        [it for it in segments if it["start"] not in (lost.start, last.start)], sound
    )

    assert found is not None
    lengths = lost.end - lost.start + last.end - last.start
    assert found["missing_s"] == pytest.approx(lengths, abs=0.1)
    assert found["gaps"][0] == pytest.approx((lost.start, lost.end), abs=0.05)
    assert found["gaps"][1] == pytest.approx((last.start, last.end), abs=0.05)


@pytest.mark.parametrize(
    ("text", "is_covered"),
    [
        (".", False),
        (".com", False),
        ("♪♪", False),
        ("Thank you.", False),
        ("The old lighthouse stood above the sea.", True),
        ("一二三四五六七八九十一二三四五六七八九十", True),
    ],
)
def test_a_few_letters_do_not_cover_28_seconds_of_speech(text: str, is_covered: bool) -> None:
    sound = _sound(np.sin(np.arange(28 * SAMPLE_RATE)))
    found = coverage_of([_segment(0, 28, text)], sound)
    assert (found is None) == is_covered
    assert found is None or found["missing_s"] == 28


def test_one_letter_covers_a_short_sound_in_a_long_silence() -> None:
    samples = np.zeros(28 * SAMPLE_RATE)
    samples[:SAMPLE_RATE] = np.sin(np.arange(SAMPLE_RATE))
    assert coverage_of([_segment(0, 28, "A")], _sound(samples)) is None
    assert coverage_of([_segment(0, 28, ".")], _sound(samples)) is not None


def test_words_for_what_is_only_noise_are_no_segment_and_quiet_speech_is() -> None:
    made = make_recording(Random(4), 40)
    samples = made.samples.copy()
    quiet, loud = made.digits[5], made.digits[6]
    first, last = round(quiet.start * SAMPLE_RATE), round(quiet.end * SAMPLE_RATE)
    samples[first:last] *= 0.1
    sound, behind = _sound(samples), loud.end + 0.12

    assert not any(sound.is_silent(it.start, it.end) for it in made.digits)
    assert sound.is_silent(behind, max(behind, made.digits[7].start - 0.12))
    assert not sound.is_silent(behind, made.digits[7].end)
    tone = _sound(np.sin(np.arange(SAMPLE_RATE)))
    assert not tone.is_silent(0.2, 0.4)


def _job(folder: Path, rows: list[dict[str, Any]], **tables: Any) -> list[dict[str, Any]]:
    write_jsonl(folder / "rows.jsonl", rows)
    (folder / "job.toml").write_text(tomlkit.dumps({**JOB, **tables}), encoding="utf-8")
    done = batchkit("run", "job.toml", cwd=folder)
    assert done.returncode in (0, 3), done.stderr
    return [*read_newest(folder / "output/run" / RESULTS)]


def test_each_part_is_a_generation_and_a_recording_one_record(tmp_path: Path) -> None:
    write_wav(tmp_path / "a.wav", make_recording(Random(1), 60).samples)
    write_wav(tmp_path / "b.wav", make_recording(Random(2), 5).samples)
    (tmp_path / "c.wav").write_bytes(b"RIFF")
    write_wav(tmp_path / "d.wav", np.random.default_rng(0).normal(0, 1e-4, 5 * SAMPLE_RATE))

    long, short, broken, silent = _job(tmp_path, [{"file": f"{name}.wav"} for name in "abcd"])

    lines = read_jsonl(tmp_path / "output/run" / STEPS)
    of_long = [line for line in lines if line["index"] == 0]
    assert len(of_long) == long["generations"] == len(long["segments"]) > 7
    assert {line["step"] for line in lines} == {"part"}
    assert len({line["request_hash"] for line in of_long}) == len(of_long)
    assert long["seconds"] == 60
    assert "coverage" not in long
    assert short["generations"] == 1
    assert short["text"] == "dry-run: no model answered row 1"
    assert broken["error"]["kind"] == "media"
    assert (silent["status"], silent["text"], silent["segments"]) == ("ok", "", [])


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({"prompt": {"audios": ["a", "b"]}}, "prompt.audios: has 2 templates"),
        ({"prompt": {"audios": ["a"], "user": "x"}}, "prompt.user: task = \"transcribe\" reads"),
        ({"task": "generate"}, '[speech]: is for task = "transcribe"'),
        ({"sampling": {"n": 2}}, "sampling.n: a recording has one transcript"),
        ({"speech": {"part_seconds": 8, "overlap_seconds": 3}}, "speech.overlap_seconds: is more"),
        ({"engine": {"kind": "transformers", "model": "m"}}, 'does not support the task "transcribe"'),
        ({"output": {"parse": "json"}}, 'output.parse: is for task = "generate"'),
    ],
)  # fmt: skip
def test_keys_that_do_not_fit_are_refused(tables: dict[str, Any], expected: str) -> None:
    with pytest.raises(JobError, match=re.escape(expected)):
        make_job({**JOB, **tables}, "the test")


def test_lines_of_a_batch_file_are_transcribed(tmp_path: Path) -> None:
    write_wav(tmp_path / "a.wav", make_recording(Random(1), 20).samples)
    bodies = [{"file_url": "a.wav", "model": "m"}, {"model": "m"}]
    rows = [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/audio/transcriptions", "body": body}
        for n, body in enumerate(bodies)
    ]

    good, bad = _job(tmp_path, rows, prompt={})

    assert good["endpoint"] == "audio/transcriptions"
    assert good["seconds"] == 20
    assert bad["error"]["kind"] == "invalid_request"
    assert "file_url" in bad["error"]["message"]
    assert json.dumps(good["segments"])
