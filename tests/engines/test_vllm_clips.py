"""Rows with video and sound answer what ``vllm.LLM.generate`` answers for the same frames and samples: greedy,
float32, row by row."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from batchkit.storage.log import STEPS
from batchkit.storage.starts import read_history
from tests.support import clips
from tests.support.forks import Fork
from tests.support.model_runs import OUTPUT, newest, write_job
from tests.support.own_process import batchkit
from tests.support.rows import read_jsonl, write_jsonl
from tests.support.small_vllm import SMALL
from tests.support.sound_model import OMNI_PLACE, PLACE, TRANSCRIBE, sound_model
from tests.support.vllm_reference import counts, generated
from tests.support.vllm_server import run_batch

pytestmark = pytest.mark.vllm

_FRAMES, _RATE = 6, 8
_VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_OPTIONS = {**SMALL, "limit_mm_per_prompt": {"image": 1, "video": 2}}


def _run(folder: Path, model: Path, options: dict[str, Any], **tables: Any) -> list[dict[str, Any]]:
    engine = {"model": str(model), "options": options}
    write_job(folder, engine=engine, sampling={"max_tokens": 16}, **tables)
    done = batchkit("run", "job.toml", cwd=folder, start=Fork)
    assert done.returncode in (0, 3), done.stderr
    return [
        {name: record[name] for name in ("text", "finish_reason")} | counts(record["usage"])
        if record["status"] == "ok"
        else record
        for record in newest(folder)
    ]


def _shown(folder: Path, name: str, made: Any) -> dict[str, Any]:
    """What vLLM gets for a clip of these frames."""
    picked = clips.chosen(len(made), _FRAMES)
    np.save(folder / f"{name}.npy", made[picked])
    return {
        "frames": str(folder / f"{name}.npy"),
        "fps": float(_RATE),
        "duration": len(made) / _RATE,
        "total_num_frames": len(made),
        "frames_indices": picked,
    }


def test_rows_with_videos_and_images_answer_as_llm_generate_does(
    demo_model: Path, tmp_path: Path
) -> None:
    rows, calls = [], []
    for n in range(12):
        made = [clips.frames(4 + 3 * n, seed=n, size=(96 + 16 * (n % 3), 64)) for _ in range(2)]
        made[1] = made[1][::-1]
        names = [f"{n}a.mkv", f"{n}b.mkv"]
        for name, its in zip(names, made, strict=True):
            clips.write(tmp_path, name, clips.video(its, rate=_RATE))
        shown = [_shown(tmp_path, name, its) for name, its in zip(names, made, strict=True)]
        Image.fromarray(made[0][0][:, ::-1]).save(tmp_path / f"{n}.png")
        rows.append({"clips": names, "q": f"question {n}", "picture": f"{n}.png"})
        text = f"{_IMAGE}first {_VIDEO} then {_VIDEO} question {n}"
        prompt = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        images = [str(tmp_path / f"{n}.png")]
        calls.append({"prompt": prompt, "videos": shown, "images": images})
    write_jsonl(tmp_path / "rows.jsonl", rows)
    prompt = {
        "user": "first {{ video }} then {{ video }} {{ q }}",
        "videos": ["{{ clips }}"],
        "images": ["{{ picture }}"],
    }

    options = {**_OPTIONS, "max_model_len": 1024}
    ours = _run(tmp_path, demo_model, options, prompt=prompt, media={"num_frames": _FRAMES})

    expected = generated({**options, "model": str(demo_model)}, calls, max_tokens=16)
    assert [n for n in range(len(rows)) if ours[n] != expected[n]] == []
    assert len({answer["text"] for answer in expected}) > len(rows) // 2
    assert read_history(tmp_path / "output/run").starts
    words = ("plan", "job.toml", "--set", "name=planned", "--rows", "3", "--json")
    plan = json.loads(batchkit(*words, cwd=tmp_path, start=Fork).stdout)
    assert plan["prompts"]["exact"]
    assert plan["prompt_tokens"]["expected"] == sum(answer["prompt_tokens"] for answer in ours)


def _film_row(folder: Path, name: str, picture: int, shown: int, heard: int) -> tuple[Any, Any]:
    """A row with an image, a film and a recording, and its call of ``LLM.generate``, with the film's sound as well."""
    made = clips.frames(9 + shown, seed=shown)
    of_film, spoken = clips.tone(1.1, hertz=200 + 50 * heard), clips.tone(0.4 + 0.3 * heard)
    clips.write(folder, f"{name}.mkv", clips.film(made, of_film, rate=_RATE))
    clips.write(folder, f"{name}.wav", clips.sound(spoken))
    Image.fromarray(clips.frames(1, seed=50 + picture)[0]).save(folder / f"{name}.png")
    sounds = [folder / f"{name}.{n}.npy" for n in range(2)]
    for file, samples in zip(sounds, (of_film, spoken), strict=True):
        np.save(file, samples.astype(np.float32) / 32768)
    text = f"{_IMAGE}{_VIDEO} sounds {OMNI_PLACE} and {OMNI_PLACE}"
    call = {
        "prompt": f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n",
        "images": [str(folder / f"{name}.png")],
        "videos": [_shown(folder, name, made)],
        "audios": [*map(str, sounds)],
    }
    return {"name": name}, call


@pytest.mark.release
def test_images_sound_and_video_of_one_row_reach_the_model_together(
    demo_model: Path, tmp_path: Path
) -> None:
    """Rows that differ in one of them alone are answered differently."""
    differing = {"same": (0, 0, 0), "picture": (1, 0, 0), "shown": (0, 1, 0), "heard": (0, 0, 1)}
    more = {str(n): (n, n, 3 * n) for n in range(2, 7)} | {"31 s": (7, 7, 102)}
    made = [_film_row(tmp_path, name, *its) for name, its in (differing | more).items()]
    rows, calls = [row for row, _ in made], [call for _, call in made]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    model = sound_model("qwen3-omni", demo_model)
    limits = {"limit_mm_per_prompt": {"image": 1, "video": 1, "audio": 2}}
    options = {**SMALL, **limits, "max_model_len": 1024}
    prompt = {
        "user": "{{ video }} sounds {{ audio }} and {{ audio }}",
        "images": ["{{ name }}.png"],
        "videos": ["{{ name }}.mkv"],
        "audios": ["{{ name }}.mkv", "{{ name }}.wav"],
    }

    ours = _run(tmp_path, model, options, prompt=prompt, media={"num_frames": _FRAMES})

    expected = generated({**options, "model": str(model)}, calls, max_tokens=16)
    assert [n for n in range(len(rows)) if ours[n] != expected[n]] == []
    assert len({answer["text"] for answer in ours[: len(differing)]}) == len(differing)
    assert len({answer["text"] for answer in ours}) > len(rows) // 2


def _audio_row(kind: str, n: int, data: bytes, format: str) -> tuple[dict[str, Any], str]:
    """A row, and its prompt for vLLM."""
    encoded = base64.b64encode(data).decode()
    if kind == "whisper":
        return {"a": f"data:audio/{format};base64,{encoded}"}, TRANSCRIBE
    sent = {"type": "input_audio", "input_audio": {"data": encoded, "format": format}}
    text = f"heard this, question {n}"
    content = [sent, {"type": "text", "text": text}]
    prompt = f"<|im_start|>user\n{PLACE}{text}<|im_end|>\n<|im_start|>assistant\n"
    return {"messages": [{"role": "user", "content": content}]}, prompt


@pytest.mark.parametrize("kind", ["qwen2-audio", "whisper"])
def test_rows_with_sound_answer_as_llm_generate_does(
    kind: str, demo_model: Path, tmp_path: Path
) -> None:
    """But the last one, whose end the model would not hear."""
    rows, calls = list[Any](), list[Any]()
    for n in range(10):
        samples = clips.tone(0.3 + 0.35 * n, hertz=150 + 190 * n)
        format, codec = ("flac", "flac") if n % 2 else ("wav", "pcm_s16le")
        data = clips.sound(samples, format=format, codec=codec)
        np.save(tmp_path / f"{n}.npy", samples.astype(np.float32) / 32768)
        row, prompt = _audio_row(kind, n, data, format)
        rows.append(row)
        calls.append({"prompt": prompt, "audios": [str(tmp_path / f"{n}.npy")]})
    too_long = clips.sound(clips.tone(30.5), format="flac", codec="flac")
    rows.append(_audio_row(kind, 10, too_long, "flac")[0])
    write_jsonl(tmp_path / "rows.jsonl", rows)
    model = sound_model(kind, demo_model)
    longest = 448 if kind == "whisper" else 1024
    options = {**SMALL, "max_model_len": longest, "limit_mm_per_prompt": {"audio": 1}}
    prompt = {"prompt": {"chat": False, "user": TRANSCRIBE, "audios": ["{{ a }}"]}}

    ours = _run(tmp_path, model, options, **(prompt if kind == "whisper" else {}))

    expected = generated({**options, "model": str(model)}, calls, max_tokens=16)
    assert [n for n in range(10) if ours[n] != expected[n]] == []
    assert len({answer["text"] for answer in expected}) >= 5
    assert ours[10]["error"]["kind"] == "media"
    assert "the model reads only the first 30 s" in ours[10]["error"]["message"]


_HEARD = """
import json, sys, numpy as np, torch
from transformers import WhisperForConditionalGeneration, WhisperProcessor
folder, *paths = sys.argv[1:]
model, processor = (kind.from_pretrained(folder) for kind in (WhisperForConditionalGeneration, WhisperProcessor))
ids = processor.tokenizer.convert_tokens_to_ids(["<|startoftranscript|>", "<|de|>", "<|en|>"])
for path in paths:
    features = processor(np.load(path), sampling_rate=16000, return_tensors="pt").input_features
    with torch.no_grad():
        logits = model.float()(features, decoder_input_ids=torch.tensor([ids[:1]])).logits[0, -1]
    print("de" if logits[ids[1]] > logits[ids[2]] else "en")
"""


@pytest.mark.release
def test_a_recording_without_a_language_is_asked_for_it_first(
    demo_model: Path, tmp_path: Path
) -> None:
    """The languages are those that transformers finds in the first token's logits, and the texts those of
    ``LLM.generate`` with them."""
    files = [tmp_path / f"{n}.npy" for n in range(10)]
    for n, file in enumerate(files):
        samples = clips.tone(0.3 + 0.35 * n, hertz=150 + 190 * n)
        clips.write(tmp_path, f"{n}.wav", clips.sound(samples))
        np.save(file, samples.astype(np.float32) / 32768)
    write_jsonl(tmp_path / "rows.jsonl", [{"a": f"{n}.wav"} for n in range(10)])
    model = sound_model("whisper", demo_model)
    options = {**SMALL, "max_model_len": 448, "limit_mm_per_prompt": {"audio": 1}}
    prompt = {"audios": ["{{ a }}"]}

    _run(tmp_path, model, options, task="transcribe", prompt=prompt, speech={"timestamps": False})

    records = newest(tmp_path)
    heard = subprocess.check_output([sys.executable, "-c", _HEARD, model, *files], text=True)
    languages = heard.split()
    assert [record["language"] for record in records] == languages
    assert "de" in languages  # which nothing here names
    lines = read_jsonl(tmp_path / OUTPUT / STEPS)
    steps = {"language", "part", "again"}  # its answers have no letters
    assert {line["step"] for line in lines} == steps
    parts = {line["index"]: line["text"] for line in lines if line["step"] == "part"}
    calls = [
        {"prompt": TRANSCRIBE.replace("en", language), "audios": [str(file)]}
        for language, file in zip(languages, files, strict=True)
    ]
    expected = generated({**options, "model": str(model)}, calls, max_tokens=16)
    assert [parts[n] for n in range(10)] == [its["text"] for its in expected]


@pytest.mark.release
@pytest.mark.parametrize("kind", ["qwen3-asr", "qwen3-omni"])
def test_speech_models_without_times_transcribe_as_vllm_s_run_batch_does(
    kind: str, demo_model: Path, tmp_path: Path
) -> None:
    """Of the same file, whose lines name a language or none. Qwen3-ASR's answers have more than the transcript."""
    model = sound_model(kind, demo_model)
    lines = []
    for n in range(10):
        recording = clips.sound(clips.tone(0.8 + 0.35 * n, hertz=170 + 190 * n), codec="pcm_f32le")
        url = f"data:audio/wav;base64,{base64.b64encode(recording).decode()}"
        body = {"model": str(model), "file_url": url, "temperature": 0, "max_completion_tokens": 16}
        body |= {"language": ("de", "en")[n % 2]} if n % 3 else {}
        body |= {"prompt": f"about number {n}"} if n % 4 == 0 else {}
        address = {"method": "POST", "url": "/v1/audio/transcriptions"}
        lines.append({"custom_id": str(n), **address, "body": body})
    write_jsonl(tmp_path / "rows.jsonl", lines)
    options = {**SMALL, "max_model_len": 256, "limit_mm_per_prompt": {"audio": 1}}

    _run(tmp_path, model, options, task="transcribe")

    theirs = run_batch(model, options, tmp_path / "rows.jsonl")
    expected = [line["response"]["body"]["text"].strip() for line in theirs]
    records = newest(tmp_path)
    assert [record["text"] for record in records] == expected
    assert len({*expected}) > len(lines) // 2
    assert all(len(record["segments"]) == 1 for record in records)
