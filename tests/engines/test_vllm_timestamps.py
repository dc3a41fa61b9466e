"""Whisper's timestamps: the rules that its next token follows, the prompts that ask for them, and answers of a tiny
Whisper with random weights, which would write them anywhere."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchkit.config.loading import make_job
from batchkit.engines.registry import open_preflight
from batchkit.errors import RequestError
from batchkit.storage.log import STEPS
from batchkit.types import Audio, Request, Row, Speech
from tests.support import clips
from tests.support.model_runs import OUTPUT, answered
from tests.support.rows import read_jsonl
from tests.support.small_vllm import SMALL
from tests.support.sound_model import sound_model

pytestmark = pytest.mark.vllm

OPTIONS = {**SMALL, "max_model_len": 448, "limit_mm_per_prompt": {"audio": 1}}
# A vocabulary of three texts, the end, <|startoftranscript|>, <|notimestamps|>, and four timestamps.
A, B, C, END, START, NO_STAMPS, S0, S1, S2, S3 = range(10)
STAMP = re.compile(r"<\|(\d+\.\d\d)\|>")


@pytest.mark.parametrize(
    ("tokens", "likely", "expected"),
    [
        ([], {A: 9}, {S0, S1, S2, S3}),
        ([], {NO_STAMPS: 9}, {S0, S1, S2, S3}),
        ([S1], {S2: 9}, {A, B, C, END}),
        ([S1, A], {A: 3}, {A, B, C, END, S2, S3}),
        ([S1, A], {START: 9, A: 3}, {A, B, C, END, S2, S3}),
        ([S1, A], {A: 3, S2: 2.8, S3: 2.8}, {S2, S3}),  # together likelier than A
        ([S1, A, S2], {A: 9}, {S2, S3}),
        ([S1, A, S2], {A: 9, END: 3}, {END, S2, S3}),
        ([S1, A, S2, S2], {S3: 9}, {A, B, C, END}),
        ([S1, A, S2, S2, B], {B: 3}, {A, B, C, END, S3}),
    ],
)
def test_the_next_token_follows_whisper_s_rules(
    tokens: list[int], likely: dict[int, float], expected: set[int]
) -> None:
    import torch
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate

    from batchkit.engines.vllm.timestamps import TimestampRules

    rules = TimestampRules(None, None, False)
    with_times = SamplingParams(extra_args={"timestamps": [END, S0]})
    added = [(0, SamplingParams(), None, [A]), (1, with_times, None, tokens)]
    rules.update_state(BatchUpdate(batch_size=2, removed=[], added=added, moved=[]))
    logits = torch.zeros(2, 10)
    for token, score in likely.items():
        logits[:, token] = score

    other, found = rules.apply(logits.clone())

    assert {*found.isfinite().nonzero().flatten().tolist()} == expected
    assert torch.equal(other, logits[0])


@pytest.fixture
def english_only(demo_model: Path, tmp_path: Path) -> Path:
    """The tiny Whisper, which says of itself what tiny.en says."""
    model = tmp_path / "tiny.en"
    shutil.copytree(sound_model("whisper", demo_model), model)
    file = model / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "is_multilingual": False}))
    return model


def _prepared(model: Path, speech: Speech, **options: Any) -> tuple[str | None, Any]:
    """The decoder's prompt in words, and the sampling parameters."""
    engine = {"model": str(model), "options": {**OPTIONS, **options}}
    table = {"task": "transcribe", "engine": engine, "speech": {"timestamps": speech.timestamps}}
    renderer = open_preflight(make_job(table, "job.toml"))
    sampling = {"temperature": 0.0, "max_tokens": 8}
    sound = Audio(np.zeros(16000, np.float32), 16000)
    request = Request(Row(0, "0", {}), None, "", sampling, "", clips=[sound], speech=speech)
    (made,) = renderer.prepare(request).inputs  # type: ignore[attr-defined]
    return renderer.render(request).text, made.params


_MULTI = "<|startoftranscript|><|de|><|transcribe|>"
_SPECULATIVE = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}


@pytest.mark.parametrize(
    ("speech", "options", "expected"),
    [
        (Speech("de"), {}, _MULTI),
        (Speech("de", timestamps=False), {}, f"{_MULTI}<|notimestamps|>"),
        (Speech("de"), _SPECULATIVE, f"{_MULTI}<|0.00|>"),
        (Speech("de", "Tea"), {}, f"<|startofprev|>Tea{_MULTI}"),
        (Speech(asks_language=True), {}, "<|startoftranscript|>"),
    ],
)
def test_the_prompt_leaves_timestamps_to_the_rules(
    speech: Speech, options: dict[str, Any], expected: str, demo_model: Path
) -> None:
    prompt, params = _prepared(sound_model("whisper", demo_model), speech, **options)
    assert prompt == expected
    follows_rules = not options and speech.timestamps and not speech.asks_language
    assert bool(params.extra_args) == follows_rules


@pytest.mark.parametrize(
    ("speech", "expected"),
    [
        (Speech("en"), "<|startoftranscript|>"),
        (Speech(), "<|startoftranscript|>"),
        (Speech("en", timestamps=False), "<|startoftranscript|><|notimestamps|>"),
        (Speech("en", "Tea"), "<|startofprev|>Tea<|startoftranscript|>"),
        (Speech(asks_language=True), "<|startoftranscript|>"),
    ],
)
def test_an_english_only_whisper_is_not_told_language_or_task(
    speech: Speech, expected: str, english_only: Path
) -> None:
    prompt, params = _prepared(english_only, speech)
    assert prompt == expected
    if speech.asks_language:
        assert len(params.allowed_token_ids) == 1


def test_an_english_only_whisper_refuses_another_language(english_only: Path) -> None:
    with pytest.raises(RequestError, match=r"speech\.language: found 'de', .* knows only English"):
        _prepared(english_only, Speech("de"))


def test_answers_of_a_random_whisper_have_timestamps_in_order(
    demo_model: Path, tmp_path: Path
) -> None:
    for n in range(6):
        clips.write(tmp_path, f"{n}.wav", clips.sound(clips.tone(1 + n, hertz=200 + 150 * n)))
    tables = {
        "prompt": {"audios": ["{{ a }}"]},
        "speech": {"language": "en"},
        "engine": {"model": str(sound_model("whisper", demo_model)), "options": OPTIONS},
        "sampling": {"max_tokens": 60},
    }
    answered(tmp_path, [{"a": f"{n}.wav"} for n in range(6)], task="transcribe", **tables)
    answers = [line["text"] for line in read_jsonl(tmp_path / OUTPUT / STEPS)]
    assert answers
    for answer in answers:
        assert STAMP.match(answer)
        times = [float(time) for time in STAMP.findall(answer)]
        assert all(a <= b for a, b in itertools.pairwise(times))
        assert not re.search(rf"(?:{STAMP.pattern}){{3}}", answer)
