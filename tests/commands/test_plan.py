"""``plan``: a forecast from a sample whose answers are the run's own."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from random import Random
from typing import Any

import pytest

from batchkit.commands.demo_digits import make_recording, write_wav
from batchkit.config.loading import load_job
from batchkit.storage.job_toml import job_of_run
from tests.support.chat_server import Refused, serving
from tests.support.command_line import Ended, batchkit
from tests.support.dry_runs import (
    RUN,
    manifest,
    n_records,
    prepare,
    rows_that_fail,
    run,
    settled,
    status,
    verify,
    write_job,
    write_rows,
)
from tests.support.server_runs import said
from tests.support.server_runs import write_job as write_server_job
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

TOKENS = 6  # of an answer of the dry-run engine
SLOW: dict[str, Any] = {"options": {"latency_s": 0.05, "max_num_seqs": 8}}
EIGHT: dict[str, Any] = {"max_in_flight": 8}
CHANGED = ("--set", "prompt.user=Say {{ q }}")


def plan(*args: str) -> Ended:
    return batchkit("plan", "job.toml", *args)


def planned(*args: str) -> dict[str, Any]:
    found = plan(*args, "--json").ok()
    return found.json


def holds(interval: dict[str, float], value: float) -> bool:
    return interval["low"] <= value <= interval["high"]


@pytest.mark.slow
def test_a_run_takes_what_was_forecast_and_begins_with_the_sample() -> None:
    write_rows([{"q": "tell me " + "more " * (n % 40)} for n in range(400)])
    write_job(
        engine=SLOW,
        run=EIGHT,
        budget={"price_per_million_tokens": [1e3, 2e3]},
    )
    found = planned()
    sampled = settled()
    assert (found["rows"], found["sampled"], found["left"]) == (400, 64, 336)
    assert len(sampled) == 64
    counted = batchkit("validate", "job.toml", "--json").json["prompt_tokens"]["sum"]
    assert found["prompt_tokens"] == dict.fromkeys(("low", "expected", "high"), counted)
    assert found["prompts"]["exact"]
    assert found["completion_tokens"]["expected"] == 400 * TOKENS
    assert found["gpu_hours"] is None, "no GPU is here"
    assert json.loads((RUN / "forecast.json").read_text()) == found

    ran = run()
    assert ran.json["skipped"] == 64
    assert settled() == dict.fromkeys(range(400), "ok")
    assert sampled.items() <= settled().items()
    assert status()["prompt_tokens"] == counted
    assert found["price"]["expected"] == pytest.approx(ran.json["price"])
    assert found["seconds"]["high"] > 336 / 8 * 0.05, "the engine can't be faster"
    assert "batchkit: forecast for the 336 remaining rows: " in ran.stderr
    assert ", loading included; price of the whole run: " in ran.stderr
    assert "; 2,400 completion tokens, forecast 2,400; price " in ran.stderr
    assert [start["command"] for start in manifest()["starts"]] == ["plan", "plan", "plan", "run"]
    assert verify() | {"lost": 0, "duplicates": 0, "pending": 0} == verify()


def test_its_text_has_an_interval_for_each_figure() -> None:
    prepare(40, engine=SLOW, run=EIGHT)
    found = plan("--rows", "8", "--price-per-million-tokens", "1e6,0").ok()
    first, prompts, answers, time, price, order, last = found.stdout.splitlines()
    assert first == "a: 40 rows, 8 of them answered for this forecast, 32 left"
    assert prompts == "prompt tokens: 120; exact, of all rows that were left"
    assert answers == f"completion tokens: {40 * TOKENS}"
    assert " s [" in time
    assert "the forecast answers 8 of 40 rows, more than a sixth of the run" in found.stderr
    assert price == "price: 120"
    assert order == "order of the rows: global (run.order)"
    assert last == "in brackets: 90 % intervals"
    assert "answering a row of the sample, 1 at a time" in found.stderr


def test_a_second_sample_adds_to_the_first_until_nothing_is_left() -> None:
    prepare(30)
    first, done = planned("--rows", "10"), settled()
    assert plan(*CHANGED).exit_code == 2
    second = planned("--rows", "10")
    assert (first["left"], second["left"]) == (20, 10)
    assert done.items() <= settled().items()
    last = planned("--rows", "1000")
    assert (last["sampled"], last["left"]) == (10, 0)
    assert last["seconds"] == {"low": 0.0, "expected": 0.0, "high": 0.0}
    assert settled() == dict.fromkeys(range(30), "ok")
    nothing = planned()
    assert (nothing["sampled"], nothing["left"]) == (0, 0)
    assert nothing["completion_tokens"]["high"] == 30 * TOKENS
    assert "forecast" not in run().stderr


def test_rows_that_would_fail_are_counted_and_not_sampled() -> None:
    rows_that_fail(100, every=4)
    write_job(run={"check_rows": 0})
    found = planned()
    assert set(settled().values()) == {"ok"}
    assert found["failing"]["rows"] == 25
    assert found["completion_tokens"]["expected"] == 75 * TOKENS
    assert "about 25 rows would fail: `batchkit validate` lists them" in plan().stdout
    assert run().exit_code == 3


def test_a_job_whose_rows_all_fail_is_not_answered() -> None:
    write_rows([{"other": "x"}] * 10)
    write_job()
    found = planned()
    assert (found["sampled"], found["left"], found["failing"]["rows"]) == (0, 10, 10)
    assert not RUN.exists()


@pytest.mark.slow
def test_prompts_of_some_rows_stand_for_all() -> None:
    write_rows([{"q": "tell me " + "more " * (n * 7 % 60)} for n in range(600)])
    write_job()
    found = planned("--lengths", "200")
    assert (found["prompts"]["counted"], found["left"]) == (200, 536)
    run()
    tokens = status()["prompt_tokens"]
    assert holds(found["prompt_tokens"], tokens)
    assert found["prompt_tokens"]["low"] < found["prompt_tokens"]["expected"] < tokens * 1.2
    assert "of 200 rows that were left" in plan("--set", "name=b", "--lengths", "200").stdout


@pytest.mark.parametrize("values", [["a"], ["a", "b", "c"]])
def test_a_sample_of_the_job_is_forecast_as_what_it_is(values: list[str]) -> None:
    prepare(500, run={"sample": 100, "max_in_flight": 50})
    crossed = ("--set", f"input.cross={{tone={values}}}")
    found = planned("--rows", "20", *crossed)
    assert job_of_run(RUN).run == load_job(Path("job.toml")).run
    n_rows = 100 * len(values)
    assert (found["rows"], found["left"]) == (n_rows, n_rows - 20)
    ran = run(*crossed)
    assert (ran.json["total"], ran.json["skipped"]) == (n_rows, 20)
    assert status()["completion_tokens"] == found["completion_tokens"]["expected"] == 6 * n_rows


def test_limit_and_seed_choose_the_rows() -> None:
    prepare(200)
    assert planned("--limit", "40")["rows"] == 40
    assert set(settled()) <= set(range(40))
    planned("--set", "name=b", "--set", "run.seed=5", "--limit", "40")
    assert set(settled(Path("output/b/results.jsonl"))) != set(settled())


@pytest.mark.slow
def test_a_server_counts_the_prompts_and_has_no_gpus() -> None:
    """Lengths of answers have a heavy tail: row n gets 4 tokens, or up to 400."""
    lengths = [400 if n % 50 == 7 else 40 if n % 10 == 3 else 4 for n in range(300)]

    def answer(text: str, body: dict[str, Any]) -> None:
        if text.startswith("row "):
            tokens = lengths[int(text.split()[1])]
            usage = {"prompt_tokens": 9, "completion_tokens": tokens}
            raise Refused(200, {**said(), "usage": usage})

    with serving(answer) as server:
        write_server_job(server, 300, sampling={"max_tokens": 500})
        found = planned("--price-per-million-tokens", "0,1_000_000")
        assert not found["prompts"]["exact"]
        assert found["gpu_hours"] is None
        assert holds(found["prompt_tokens"], 9 * 300)
        assert holds(found["completion_tokens"], sum(lengths))
        assert holds(found["price"], sum(lengths))
        assert found["completion_tokens"]["high"] < 300 * 500
        assert "estimated from the sample" in plan("--rows", "4").stdout
        assert run().exit_code == 0


@pytest.mark.parametrize("prices", ["1", "1,2,3", "a,b"])
def test_prices_of_tokens_are_two(prices: str) -> None:
    prepare(3)
    found = plan("--price-per-million-tokens", prices).refused()
    assert f"--price-per-million-tokens {prices}: write two prices" in found


def test_a_budget_ends_the_sample() -> None:
    prepare(100, budget={"max_completion_tokens": 5 * TOKENS})
    assert "budget.max_completion_tokens = 30 stopped the sample" in plan("--rows", "40").refused(1)
    assert 5 <= len(settled()) < 40
    assert not (RUN / "forecast.json").exists()


def test_a_row_of_several_steps_has_more_prompts_than_the_first() -> None:
    write_rows(40)
    steps = [
        {"name": "draft", "prompt": {"user": "{{ q }}"}},
        {"name": "short", "prompt": {"user": "Shorten: {{ steps.draft.text }}"}},
    ]
    write_job(prompt=None, steps=steps)
    found = planned("--rows", "8")
    assert not found["prompts"]["exact"]
    assert run().exit_code == 0
    assert holds(found["prompt_tokens"], status()["prompt_tokens"])
    assert found["completion_tokens"]["expected"] == status()["completion_tokens"]


@pytest.mark.slow
def test_an_interrupted_sample_keeps_what_was_answered(start: Any) -> None:
    prepare(400, engine={"options": {"latency_s": 0.3, "max_num_seqs": 4}})
    process = start("plan", "job.toml")
    until(lambda: n_records() >= 6)
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 130
    assert not (RUN / "forecast.json").exists()
    done = settled()
    assert set(done.values()) == {"ok"}
    assert verify() | {"lost": 0, "pending": 400 - len(done)} == verify()


def test_a_run_that_goes_on_has_the_rest_of_its_forecast_and_gpu_hours_are_of_all_starts() -> None:
    prepare(40, engine=SLOW, run=EIGHT)
    priced = ("--price-per-gpu-hour", "2")
    planned("--rows", "8", *priced)
    part = run("--limit", "30")
    assert "it took" not in part.stderr
    ran = run()
    assert f"forecast for the {40 - part.json['ok']} remaining rows: " in ran.stderr
    assert "batchkit: it took " in ran.stderr
    assert "240 completion tokens, forecast 240" in ran.stderr
    held = sum(start["gpu_seconds"] for start in manifest()["starts"]) / 3600
    hours = planned(*priced)["gpu_hours"]
    assert hours == dict.fromkeys(("low", "expected", "high"), pytest.approx(held, abs=1e-6))
    assert held > 40 / 8 * 0.05 / 3600


@pytest.mark.parametrize(
    ("planned_with", "run_with"),
    [
        (["--limit", "40"], []),
        ([], ["--limit", "40"]),
        ([], [*CHANGED, "--on-change", "requeue"]),
        ([], [*CHANGED, "--fresh"]),
        ([], ["--set", "run.max_in_flight=1"]),
    ],
)
def test_a_forecast_of_another_job_is_not_announced(
    planned_with: list[str], run_with: list[str]
) -> None:
    prepare(100)
    planned("--rows", "4", *planned_with)
    assert " forecast " not in run(*run_with).stderr


def test_a_forecast_at_another_price_still_holds() -> None:
    prepare(100)
    assert planned("--set", "name=b")["sampled"] == 25, "at most a quarter of the rows"
    planned("--rows", "4", "--price-per-million-tokens", "1,2")
    assert "forecast for the 96 remaining rows" in run().stderr


@pytest.mark.parametrize("content", ['{"run": 1', '{"run": "CREATED"}'])
def test_a_damaged_forecast_stops_no_run(content: str) -> None:
    prepare(20)
    planned("--rows", "4")
    created = manifest()["created_at"]
    (RUN / "forecast.json").write_text(content.replace("CREATED", created))
    ran = run().ok()
    assert " forecast " not in ran.stderr


def test_a_sample_that_fails_is_no_forecast() -> None:
    def answer(text: str, body: dict[str, Any]) -> None:
        if refused == "all" or "row 1" in text:
            raise Refused(400, {"error": {"message": "no such thing"}})

    refused = "some"
    with serving(answer) as server:
        write_server_job(server, 20)
        found = planned("--rows", "20")
        assert found["failing"]["sampled"] == 11
        refused = "all"
        ended = plan("--set", "name=b", "--rows", "8")
    assert ended.exit_code == 1
    assert "all 8 rows of the sample failed" in ended.stderr
    assert "batchkit show --failed " in ended.stderr
    assert not Path("output/b/forecast.json").exists()


@pytest.mark.slow
def test_recordings_are_judged_by_their_seconds() -> None:
    """A few of them have most of the sound, and a sample may have none of these."""
    lengths = [8] * 32 + [160] * 4
    for n, seconds in enumerate(lengths):
        write_wav(Path(f"{n}.wav"), make_recording(Random(n), seconds).samples)
    write_rows([{"file": f"{n}.wav"} for n in range(len(lengths))])
    tables = {"prompt": {"user": "", "audios": ["{{ file }}"]}, "speech": {"part_seconds": 8}}
    write_job(task="transcribe", **tables, budget={"price_per_million_tokens": [0.0, 1e6]})
    found = planned("--rows", "6")
    assert found["prompts"]["unit"] == "seconds"

    price = run().json["price"]
    assert price > 2 * TOKENS * len(lengths)
    assert found["price"]["expected"] == pytest.approx(price, rel=0.2)
