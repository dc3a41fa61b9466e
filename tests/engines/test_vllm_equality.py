"""Our feed answers what ``vllm.LLM.chat`` answers: greedy, float32, row by row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from batchkit.storage.log import RESULTS
from batchkit.storage.newest import read_newest
from tests.support.forks import Fork
from tests.support.own_process import batchkit
from tests.support.paths import ROOT
from tests.support.rows import write_jsonl
from tests.support.small_vllm import SMALL
from tests.support.vllm_reference import reference

pytestmark = pytest.mark.vllm

JOBS = ROOT / "jobs"
N_TEXT, N_IMAGES, MAX_TOKENS = 60, 24, 24


def _ours(folder: Path) -> list[dict[str, Any]]:
    return [
        {
            "text": record["text"],
            "finish_reason": record["finish_reason"],
            **record["usage"],
        }
        for record in read_newest(folder / RESULTS)
    ]


def _job(tmp_path: Path, model: Path, prompt: str) -> Path:
    options = "\n".join(
        f"{name} = {json.dumps(value)}"
        for name, value in SMALL.items()
        if name != "limit_mm_per_prompt"
    )
    path = tmp_path / "job.toml"
    path.write_text(
        f"""
name = "equal"
[input]
path = "rows.jsonl"
[prompt]
{prompt}
[engine]
model = "{model}"
[engine.options]
limit_mm_per_prompt = {{ image = 2, video = 0 }}
{options}
[sampling]
max_tokens = {MAX_TOKENS}
[run]
max_in_flight = 9
""",
        encoding="utf-8",
    )
    return path


def test_text_answers_equal_those_of_llm_chat(tmp_path: Path, text_model: Path) -> None:
    rows = [{"q": f"question {n} " + "about tea " * (n * 7 % 40)} for n in range(N_TEXT)]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    options = {**SMALL, "model": str(text_model)}
    del options["limit_mm_per_prompt"]
    job = _job(tmp_path, text_model, 'system = "Be brief."\nuser = "Say: {{ q }}"')
    job.write_text(job.read_text().replace("limit_mm_per_prompt = { image = 2, video = 0 }", ""))

    done = batchkit("run", job, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    expected = reference(
        options,
        [
            [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": f"Say: {row['q']}"},
            ]
            for row in rows
        ],
        MAX_TOKENS,
    )
    assert _ours(tmp_path / "output/equal") == expected


def test_image_answers_equal_those_of_llm_chat(tmp_path: Path, demo_model: Path) -> None:
    rows = []
    for n in range(N_IMAGES):
        image = Image.new("RGB", (128 + 32 * (n % 5), 96 + 32 * (n % 3)), (n * 9 % 256, 80, 140))
        image.paste((255, 255, 255 - n), (10 + n, 10, 60 + n, 50))
        image.save(tmp_path / f"{n}.png")
        rows.append({"q": f"what is shown in picture {n}?", "file": f"{n}.png"})
    write_jsonl(tmp_path / "rows.jsonl", rows)
    job = _job(
        tmp_path,
        demo_model,
        'user = "{{ q }}"\nimages = ["{{ file }}", "{{ file }}"]\ncaptions = ["First:", "Again:"]',
    )

    done = batchkit("run", job, cwd=tmp_path, start=Fork)

    assert done.returncode == 0, done.stderr
    picture = lambda row: {"type": "image_path", "path": str(tmp_path / row["file"])}  # noqa: E731
    text = lambda value: {"type": "text", "text": value}  # noqa: E731
    expected = reference(
        {**SMALL, "model": str(demo_model)},
        [
            [
                {
                    "role": "user",
                    "content": [
                        text("First:"),
                        picture(row),
                        text("Again:"),
                        picture(row),
                        text(row["q"]),
                    ],
                }
            ]
            for row in rows
        ],
        MAX_TOKENS,
    )
    ours = _ours(tmp_path / "output/equal")
    assert ours == expected
    assert len({answer["text"] for answer in ours}) > N_IMAGES // 2, "answers don't depend on rows"


def test_the_window_does_not_change_the_answers(tmp_path: Path, demo_model: Path) -> None:
    def run(max_in_flight: str) -> list[dict[str, Any]]:
        name = f"window_{max_in_flight}"
        settings = [f"name={name}", f"engine.model={demo_model}"]
        if max_in_flight != "auto":
            settings.append(f"run.max_in_flight={max_in_flight}")
        flags = [part for setting in settings for part in ("--set", setting)]
        done = batchkit("run", JOBS / "quickstart.toml", *flags, cwd=tmp_path, start=Fork)
        assert done.returncode == 0, done.stderr
        return _ours(tmp_path / "output" / name)

    assert run("1") == run("auto")
