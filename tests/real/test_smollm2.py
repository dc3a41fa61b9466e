"""SmolLM2-135M-Instruct: an instruct model with real weights, on real vLLM."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import own_process
from tests.support.forks import Fork
from tests.support.model_runs import answered, newest, run_job, write_job
from tests.support.real_models import OPTIONS, QUESTIONS, reviews
from tests.support.vllm_reference import counts

pytestmark = pytest.mark.real

CHOICE = {"choice": ["positive", "negative"]}
MOOD = "What is the mood of this review, positive or negative?\n\n{{ review }}"
SCHEMA = {
    "type": "object",
    "properties": {"place": {"type": "string", "maxLength": 20}, "good": {"type": "boolean"}},
    "required": ["place", "good"],
    "additionalProperties": False,
}


def texts(folder: Path) -> list[Any]:
    return [record["text"] for record in newest(folder)]


@pytest.mark.parametrize("kind", ["vllm", "transformers"])
def test_sixty_questions_are_answered_as_llm_chat_answers_them(
    kind: str, engine: dict[str, Any], expected: list[Any], tmp_path: Path
) -> None:
    options = OPTIONS if kind == "vllm" else {"dtype": "float32", "max_num_seqs": 8}
    tables = {"engine": {**engine, "kind": kind, "options": options}}
    rows = [{"q": question} for question in QUESTIONS]
    sampling = {"temperature": 0, "max_tokens": 48}
    found = answered(tmp_path, rows, prompt={"user": "{{ q }}"}, sampling=sampling, **tables)
    ours = [
        {name: record[name] for name in ("text", "finish_reason")} | counts(record["usage"])
        for record in found
    ]
    assert ours == expected
    assert len({answer["text"] for answer in expected}) > 50


def test_the_mood_of_reviews_is_found(engine: dict[str, Any], tmp_path: Path) -> None:
    write_job(
        tmp_path,
        reviews(),
        engine=engine,
        prompt={"system": "You judge the mood of reviews.", "user": MOOD},
        sampling={"temperature": 0, "max_tokens": 8, "structured_outputs": CHOICE},
        scoring={"reference": "mood", "scorers": ["em"]},
    )
    run_job(tmp_path)
    scored = own_process.batchkit("score", "output/run", "--json", cwd=tmp_path)
    found = json.loads(scored.stdout)
    assert found["overall"]["n"] == 60
    assert found["overall"]["em"] >= 95


def test_answers_by_a_schema_become_columns(engine: dict[str, Any], tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    write_job(
        tmp_path,
        reviews()[:20],
        engine=engine,
        prompt={"user": "Which place is reviewed, and is it good?\n\n{{ review }}"},
        sampling={"temperature": 0, "max_tokens": 48, "structured_outputs": {"json": SCHEMA}},
        output={"parse": "json"},
    )
    run_job(tmp_path)
    exported = own_process.batchkit("export", "output/run", "answers.parquet", cwd=tmp_path)
    assert exported.returncode == 0, exported.stderr
    table = pq.read_table(tmp_path / "answers.parquet")
    assert table.num_rows == 20
    assert {type(good) for good in table["good"].to_pylist()} == {bool}
    assert all(table["place"].to_pylist())


def test_sampling_parameters_do_what_vllm_says(engine: dict[str, Any], tmp_path: Path) -> None:
    sampling = {"max_tokens": 64, "n": 4, "temperature": 0.8, "seed": 7, "logprobs": 2}
    write_job(
        tmp_path,
        [{"q": question} for question in QUESTIONS[:8]],
        engine=engine,
        prompt={"user": "{{ q }}"},
        sampling={**sampling, "stop": ["."], "bad_words": ["the"]},
        select={"by": "majority"},
        scoring={"extract": {"regex": {"pattern": r"^\W*(\w+)"}}},
        output={"choices": True},
    )
    run_job(tmp_path)
    for record in newest(tmp_path):
        assert len(record["choices"]) == 4
        assert 0 <= record["selected"] < 4
        for choice in record["choices"]:
            assert "." not in choice["text"]
            assert " the " not in choice["text"]
            assert choice["logprobs"]


def test_a_prompt_over_the_context_is_cut_or_fails_alone(
    engine: dict[str, Any], tmp_path: Path
) -> None:
    rows = [{"q": "Say hello."}, {"q": "Count the words: " + "apple pear " * 900}]
    tables = {"engine": engine, "sampling": {"temperature": 0, "max_tokens": 16}}
    found = answered(tmp_path, rows, exit_code=3, prompt={"user": "{{ q }}"}, **tables)
    assert [record["status"] for record in found] == ["ok", "failed"]
    assert found[1]["error"]["kind"] == "prompt_too_long"
    tables |= {"prompt": {"user": "{{ q }}"}, "retry": {"on_too_long": "truncate-middle"}}
    found = answered(tmp_path, rows, name="cut", **tables)
    assert found[1]["truncated_tokens"] > 0


def test_steps_with_a_parsed_answer(engine: dict[str, Any], tmp_path: Path) -> None:
    mood = {"structured_outputs": {"json": SCHEMA}, "max_tokens": 48}
    steps = [
        {"name": "read", "prompt": {"user": "{{ review }}"}, "sampling": mood, "parse": "json"},
        {
            "name": "say",
            "prompt": {"user": "Write one sentence about {{ steps.read.json.place }}."},
        },
    ]
    sampling = {"temperature": 0, "max_tokens": 24}
    found = answered(tmp_path, reviews()[:12], engine=engine, steps=steps, sampling=sampling)
    assert [record["generations"] for record in found] == [2] * 12
    assert all(record["text"].strip() for record in found)


@pytest.mark.parametrize("kind", ["rows", "steps"])
def test_killed_runs_answer_as_one_that_nobody_disturbed(
    kind: str, engine: dict[str, Any], tmp_path: Path
) -> None:
    n_kills = 6 if kind == "rows" else 4
    rows = [{"q": question} for question in QUESTIONS]
    tables: dict[str, Any] = {"prompt": {"user": "{{ q }}"}}
    if kind == "steps":
        rows = rows[:24]
        tables = {
            "steps": [
                {"name": "draft", "prompt": {"user": "{{ q }}"}},
                {"name": "short", "prompt": {"user": "Shorten this: {{ steps.draft.text }}"}},
            ]
        }
    tables |= {"engine": engine, "sampling": {"temperature": 0, "max_tokens": 48}}
    undisturbed = [record["text"] for record in answered(tmp_path, rows, name="alone", **tables)]
    write_job(tmp_path, **tables)
    draw = random.Random(20261129)
    log = tmp_path / "output/run/results.jsonl"
    for number in range(n_kills):
        least = number * len(rows) // (2 * n_kills)
        process = own_process.begin("run", "job.toml", cwd=tmp_path, start=Fork)
        while process.poll() is None:
            if log.exists() and log.read_bytes().count(b"\n") > least:
                break
            time.sleep(0.02)
        time.sleep(draw.random())
        process.send_signal(signal.SIGKILL)
        process.communicate()
    run_job(tmp_path)
    assert texts(tmp_path) == undisturbed
    verified = own_process.batchkit("verify", "output/run", "--json", cwd=tmp_path)
    assert json.loads(verified.stdout)["duplicates"] == 0
