"""Runs that end before their rows do: budgets of time, tokens and money, and random samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchkit.errors import JobError
from batchkit.execution.processor import ProductionBatchProcessor
from batchkit.types import Usage
from tests.support.chat_server import Refused, serving
from tests.support.command_line import batchkit
from tests.support.dry_runs import (
    RUN,
    job,
    manifest,
    prepare,
    records,
    rows_that_fail,
    run,
    settled,
    status,
    verify,
    write_job,
)
from tests.support.rows import write_jsonl
from tests.support.server_runs import said
from tests.support.server_runs import write_job as write_server_job

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

TOKENS = 6  # of an answer of the dry-run engine
ONE_AT_A_TIME: dict[str, Any] = {"max_in_flight": 1}


def test_tokens_are_a_budget_of_the_run_and_a_larger_one_continues_it() -> None:
    prepare(30, run=ONE_AT_A_TIME, budget={"max_completion_tokens": 10 * TOKENS})
    found = run()
    assert (found.exit_code, found.json["exit"]) == (1, 1)
    assert found.json["stopped_by"] == "budget.max_completion_tokens = 60"
    assert settled() == dict.fromkeys(range(10), "ok")
    assert "budget: budget.max_completion_tokens = 60, 60 left" in found.stderr
    assert (
        "20 rows are left; to continue, raise this limit: --set budget.max_completion_tokens=…"
        in found.stderr
    )
    assert manifest()["starts"][-1]["exit"] == 1
    assert verify() | {"lost": 0, "pending": 20, "checkpoint_matches": True} == verify()

    again = run()
    assert (again.exit_code, again.json["ok"]) == (1, 10)
    assert "loading model" not in again.stderr  # it is said before that takes minutes

    more = run("--set", f"budget.max_completion_tokens={20 * TOKENS}")
    assert (more.exit_code, more.json["ok"]) == (1, 20)
    assert "budget.max_completion_tokens = 120, 60 left" in more.stderr
    rest = run("--set", "budget.max_completion_tokens=100_000")
    assert (rest.exit_code, rest.json["ok"], rest.json["stopped_by"]) == (0, 30, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "said"),
    [
        (
            {"max_seconds": 1},
            "stopping at budget.max_seconds = 1: waiting up to 10 s for 12 rows in flight",
        ),
        (
            {"max_price": 1, "price_per_gpu_hour": 3600},
            "stopping at budget.max_price = 1: waiting for 12 rows in flight",
        ),
    ],
)
def test_rows_in_flight_are_paid_for_and_finished(budget: dict[str, Any], said: str) -> None:
    prepare(40, engine={"options": {"latency_s": 1.2}}, run={"max_in_flight": 12}, budget=budget)
    found = run()
    assert found.exit_code == 1
    assert settled() == dict.fromkeys(range(12), "ok")
    assert said in found.stderr


def test_a_budget_that_is_used_up_before_the_end_of_the_input_is_seen_stops_nothing() -> None:
    """A last check of the input goes on for a while after its last row was handed out."""
    rows: list[dict[str, Any]] = [{"q": f"question {n}"} for n in range(17)]
    rows[0]["pad"] = "x" * 15_000_000
    write_jsonl(Path("in.jsonl"), rows)
    write_job(
        run={**ONE_AT_A_TIME, "order": "input", "render_threads": 1, "check_rows": 0},
        budget={"max_completion_tokens": 17 * TOKENS},
    )
    found = run()
    assert (found.exit_code, found.json["ok"], found.json["stopped_by"]) == (0, 17, None)
    assert run().exit_code == 0


def test_tokens_of_attempts_that_were_not_the_last_are_paid_for() -> None:
    """Two answers are no JSON; each answer has 4 tokens, for a prompt of 3."""
    answers = iter(['{"a": 1}', "no", "no", '{"a": 2}', '{"a": 3}'])

    def answer(text: str, body: dict[str, Any]) -> None:
        if text.startswith("row "):
            raise Refused(200, said(next(answers)))

    with serving(answer) as server:
        write_server_job(
            server,
            3,
            output={"parse": "json"},
            retry={"reask": 2, "reask_note": "JSON, please."},
            run=ONE_AT_A_TIME,
            budget={"max_completion_tokens": 16, "price_per_million_tokens": [1e6, 0]},
        )
        found = run()
        assert (found.exit_code, found.json["ok"]) == (1, 2), found.stderr
        assert (found.json["completion_tokens"], found.json["price"]) == (16, 12)
        assert [record.get("earlier_usage") for record in records()] == [
            None,
            {"prompt_tokens": 6, "completion_tokens": 8},
        ]
        assert status()["completion_tokens"] == 16
        assert (
            "budget.max_completion_tokens = 20, 4 left"
            in (rest := run("--set", "budget.max_completion_tokens=20")).stderr
        )
        assert (rest.json["ok"], rest.json["stopped_by"]) == (3, None)
        assert verify() | {"checkpoint_matches": True, "torn_bytes": 0} == verify()


@pytest.mark.slow
def test_seconds_are_a_budget_of_each_start() -> None:
    prepare(
        200, engine={"options": {"latency_s": 0.05}}, run=ONE_AT_A_TIME, budget={"max_seconds": 2}
    )
    done = 0
    for _ in range(2):
        found = run()
        assert (found.exit_code, found.json["stopped_by"]) == (1, "budget.max_seconds = 2")
        assert "budget.max_seconds = 2 for this start" in found.stderr
        assert "run the same command to continue" in found.stderr
        assert done < found.json["ok"] < 200
        done = found.json["ok"]
    assert settled() == dict.fromkeys(range(done), "ok")


def test_price_of_tokens_is_that_of_all_starts() -> None:
    prices = {"price_per_million_tokens": [1.0, 500_000.0], "max_price": 15.0}
    prepare(30, run=ONE_AT_A_TIME, budget=prices)  # 3 a row, and 0.000003 for its prompt
    found = run()
    assert (found.exit_code, found.json["ok"], found.json["price"]) == (1, 5, 15.000015)
    assert "budget.max_price = 15, 15 left" in found.stderr
    assert "price so far: 15" in found.stderr
    more = run("--set", "budget.max_price=30")
    assert (more.json["ok"], more.json["price"]) == (10, 30.00003)


def test_price_of_gpus_is_that_of_all_starts() -> None:
    """Loading included, and what an earlier start has used is known to the next."""
    prepare(
        200,
        engine={"options": {"latency_s": 0.05, "max_num_seqs": 2}},
        run=ONE_AT_A_TIME,
        budget={"price_per_gpu_hour": 3600.0, "max_price": 0.6},
    )
    found = run()
    assert (found.exit_code, found.json["stopped_by"]) == (1, "budget.max_price = 0.6")
    assert 0.6 <= found.json["price"] < 5
    assert 0.6 <= manifest()["starts"][-1]["gpu_seconds"] < 5
    assert "loading model" not in run().stderr


@pytest.mark.parametrize(
    ("tables", "gpus"),
    [
        ({}, 1),
        ({"engine": {"options": {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}}}, 8),
        ({"engine": {"options": {"tensor_parallel_size": 2}}, "workers": {"count": 3}}, 6),
        ({"workers": {"count": 4, "gpus": 0.5}}, 2),
        ({"workers": {"count": "auto", "min": 3, "gpus": 2}}, 6),
    ],
)
def test_each_gpu_of_the_job_is_paid_for(tables: dict[str, Any], gpus: float) -> None:
    engine = {"kind": "vllm", "model": "m"} | tables.get("engine", {})
    made = job(**tables | {"engine": engine, "budget": {"price_per_gpu_hour": 2.0}})
    assert made.budget.price_of(Usage(0, 0), 1800.0 + made.gpus * 3600.0) == 2.0 * (0.5 + gpus)


def test_retry_has_the_budget_of_the_run() -> None:
    write_jsonl(Path("in.jsonl"), [{"other": 1}] * 6 + [{"q": f"x {n}"} for n in range(6)])
    write_job(run={"check_rows": 0})
    assert run().exit_code == 3
    retry, key = ["retry-failed", str(RUN)], "budget.max_completion_tokens"
    found = batchkit(*retry, "--set", f"{key}={6 * TOKENS}")
    assert found.exit_code == 1
    assert f"6 failed rows are left; to continue, raise this limit: --set {key}=…" in found.stderr
    assert len(records()) == 12
    assert batchkit(*retry, "--set", f"{key}={6 * TOKENS + 1}").exit_code == 3
    assert len(records()) == 18


def test_a_price_that_is_not_known_is_refused() -> None:
    prepare(3, budget={"max_price": 5})
    found = run()
    assert found.exit_code == 2
    assert (
        "max_price needs a price: set price_per_gpu_hour, or price_per_million_tokens"
        in found.stderr
    )


def sample_of(*args: str) -> dict[str, Any]:
    found = run(*args)
    assert found.exit_code == 0, found.stderr
    return found.json


def test_a_sample_is_random_and_a_later_start_runs_the_rest() -> None:
    prepare(200, run={"sample": 20})
    found = run()
    assert (found.exit_code, found.json["ok"], found.json["total"]) == (0, 20, 20)
    assert "run.sample: 20 of 200 rows, drawn at random with run.seed = 0" in found.stderr
    chosen = set(settled())
    assert len(chosen) == 20
    assert not chosen <= set(range(100))
    assert chosen & set(range(100))
    assert status() | {"total": 200, "pending": 180} == status()
    assert verify() | {"pending": 180, "lost": 0} == verify()

    assert sample_of()["skipped"] == 20  # the same rows: nothing is left to do
    more = sample_of("--set", "run.sample=50")
    assert (more["ok"], more["skipped"], more["total"]) == (50, 20, 50)
    assert chosen < set(settled())

    write_job()
    rest = sample_of()
    assert (rest["ok"], rest["skipped"], rest["total"]) == (200, 50, 200)
    assert settled() == dict.fromkeys(range(200), "ok")


def test_another_seed_draws_other_rows() -> None:
    chosen = []
    for seed in (1, 2):
        prepare(200, run={"sample": 20, "seed": seed})
        sample_of("--fresh")
        chosen.append(set(settled()))
    assert chosen[0] != chosen[1]


def test_a_sample_is_of_the_rows_that_the_filter_keeps() -> None:
    prepare(60, input={"where": {"key": [f"k{n}" for n in range(0, 60, 3)]}}, run={"sample": 8})
    found = run()
    assert (found.exit_code, found.json["ok"], found.json["total"]) == (0, 8, 8)
    assert {index % 3 for index in settled()} == {0}
    assert "8 of 20 rows" in found.stderr


def test_rows_that_are_done_count_beside_the_sample() -> None:
    prepare(100, run=ONE_AT_A_TIME)
    assert run("--limit", "10").exit_code == 0
    found = sample_of("--set", "run.sample=20")
    assert found["skipped"] == 10
    assert found["ok"] == found["total"] == len(settled())


def test_retry_of_a_sample_is_complete_without_the_other_rows() -> None:
    rows_that_fail(60, every=3)
    write_job(run={"sample": 12})
    assert run().exit_code == 3
    retried = batchkit("retry-failed", "output/a", "--json")
    assert (retried.exit_code, retried.json["exit"], retried.json["total"]) == (3, 3, 12)
    assert "remain" not in retried.stderr
    assert run("--set", "run.sample=30").exit_code == 3
    cured = batchkit("retry-failed", "output/a", "--set", "prompt.user={{ other }}")
    assert cured.exit_code == 0, cured.stderr
    assert status() | {"total": 60, "pending": 30} == status()


def test_a_sample_of_a_table_keeps_its_index() -> None:
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"prompt": [f"q{n}" for n in range(50)]}, index=range(100, 150))
    made = job(prompt={"user": "{{ prompt }}"}, run={"sample": 10})
    summary = ProductionBatchProcessor(made, quiet=True).process(frame)
    answers = summary.to_pandas()
    assert list(answers.index) == list(range(100, 150))
    assert answers["text"].notna().sum() == 10


def test_a_sample_of_an_iterator_is_refused_before_the_earlier_run_is_moved() -> None:
    processor = ProductionBatchProcessor(job(run={"sample": 2}), quiet=True)
    processor.process(["a", "b", "c"])
    with pytest.raises(JobError, match=r"run\.sample: rows from an iterator"):
        processor.process(iter(["a", "b", "c"]))
    assert manifest()["total"] == 3
