"""Equal requests are computed once, and answers of other runs are used again."""

from __future__ import annotations

import fcntl
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchkit.storage.vectors import Vectors
from tests.support import dry_runs, own_process, scripted
from tests.support.chat_server import Refused, serving
from tests.support.command_line import batchkit
from tests.support.dry_runs import RUN, records, verify, write_rows
from tests.support.rows import read_jsonl
from tests.support.scripted import Script
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

OTHER = Path("output/b")


def rows_with(*questions: str) -> list[dict[str, Any]]:
    return write_rows([{"key": f"k{n}", "q": q} for n, q in enumerate(questions)])


def write_job(**tables: Any) -> None:
    dry_runs.write_job(**{"run": {"deduplicate": True}, **tables})


def prepare(n: int) -> None:
    write_rows(n)
    write_job()


def run(*args: str, name: str = "a") -> dict[str, Any]:
    return dry_runs.run("--set", f"name={name}", *args).ok().json


def by_row(folder: Path = RUN) -> dict[int, dict[str, Any]]:
    return {record["index"]: record for record in records(folder / "results.jsonl")}


def test_equal_requests_are_computed_once() -> None:
    rows_with("x", "y", "x", "z", "x", "y")
    write_job()
    summary = run()
    assert (summary["ok"], summary["deduplicated"], summary["reused"]) == (6, 3, 0)
    found = by_row()
    assert {n: record.get("duplicate_of") for n, record in found.items()} == {
        0: None,
        1: None,
        3: None,
        2: 0,
        4: 0,
        5: 1,
    }
    assert found[2]["text"] == found[0]["text"] != found[1]["text"]
    assert found[2]["usage"] is None
    assert found[0]["usage"] is not None
    assert len({record["request_hash"] for record in found.values()}) == 3
    assert verify()["records"] == 6


@pytest.mark.parametrize(
    ("sampling", "n_copies"),
    [({"temperature": 0.7}, 0), ({"temperature": 0.7, "seed": 3}, 1), ({"temperature": 0}, 1)],
)
def test_only_determined_answers_are_copied(sampling: dict[str, Any], n_copies: int) -> None:
    rows_with("x", "x")
    write_job(sampling=sampling)
    assert run()["deduplicated"] == n_copies
    assert run("--set", "run.deduplicate=false", name="b")["deduplicated"] == 0


def test_a_failure_is_not_copied_and_the_next_equal_request_is_computed() -> None:
    script = Script(same=[Refused(400, {"error": {"message": "no"}}), "yes"])
    rows = [{**scripted.row("same"), "key": n} for n in range(4)]
    with serving(script) as server:
        ended = scripted.run(server, rows, input={"id": "key"}, run={"check_rows": 0})
    assert ended.exit_code == 3, ended.stderr
    found = scripted.records()
    assert [found[str(n)]["status"] for n in range(4)] == ["failed", "ok", "ok", "ok"]
    assert [found[str(n)].get("duplicate_of") for n in range(4)] == [None, None, 1, 1]
    assert script.calls == {"same": 2}
    with serving(script) as server:
        base_url = f"engine.base_url={server.url}"
        batchkit("retry-failed", str(RUN), "--set", base_url).ok()
    assert scripted.records()["0"]["duplicate_of"] == 1
    assert script.calls == {"same": 2}


def test_each_copy_has_the_score_of_its_own_reference() -> None:
    rows = [{**scripted.row("same"), "key": n, "a": a} for n, a in enumerate(["7", "8"])]
    scoring = {"reference": "a", "scorers": ["em"]}
    with serving(Script(same=["7"])) as server:
        scripted.run(server, rows, input={"id": "key"}, scoring=scoring).ok()
    assert [scripted.records()[key]["scores"] for key in "01"] == [{"em": 1.0}, {"em": 0.0}]


def test_a_resumed_run_copies_answers_of_earlier_starts() -> None:
    rows_with("x", "y", "x", "y", "z", "x")
    write_job()
    run("--limit", "2")
    summary = run()
    assert (summary["skipped"], summary["deduplicated"]) == (2, 3)
    assert [by_row()[n].get("duplicate_of") for n in (2, 3, 5)] == [0, 1, 0]


def test_a_requeue_forgets_the_index_of_the_old_log() -> None:
    rows = rows_with("x", "y", "x")
    write_job(input={"id": "key"})
    run()
    write_rows([rows[1], rows[2], rows[0], {"key": "k3", "q": "y"}])
    summary = run("--on-change", "requeue")
    found = by_row()
    assert summary["ok"] == 4
    assert [found[n].get("duplicate_of") for n in range(4)] == [None, 2, None, 0]
    assert found[3]["text"] == found[0]["text"]


def test_vectors_are_copied() -> None:
    rows_with("x", "y", "x")
    write_job(task="embed", run={"order": "input", "deduplicate": True})
    run("--limit", "2")
    assert run()["deduplicated"] == 1
    found, vectors = by_row(), Vectors(RUN)
    assert found[2]["embedding"] != found[0]["embedding"]
    assert np.array_equal(vectors.of(found[2]), vectors.of(found[0]))
    assert verify()["bad_vectors"] == 0


def test_generations_of_steps_are_copied() -> None:
    rows_with("x", "y", "x")
    steps = [
        {"name": "draft", "prompt": {"user": "Draft {{ q }}"}},
        {"name": "check", "prompt": {"user": "Check {{ steps.draft.text }} for {{ key }}"}},
    ]
    write_job(steps=steps, prompt=None)
    run("--limit", "2")
    assert run()["deduplicated"] == 1
    drafts = [line for line in read_jsonl(RUN / "steps.jsonl") if line["step"] == "draft"]
    assert [line.get("duplicate_of") for line in drafts] == [None, None, 0]
    found = by_row()
    assert found[2]["steps"]["draft"] == found[0]["steps"]["draft"]
    assert found[2]["usage"]["prompt_tokens"] < found[0]["usage"]["prompt_tokens"]


def test_all_choices_are_copied() -> None:
    rows_with("x", "x")
    write_job(sampling={"temperature": 1, "seed": 1, "n": 3})
    run("--limit", "1")
    assert run()["deduplicated"] == 1
    assert len(by_row()[1]["choices"]) == 3


def test_answers_without_all_choices_are_computed_again() -> None:
    rows_with("x", "x")
    write_job(
        sampling={"temperature": 1, "seed": 1, "n": 3},
        select={"by": "majority"},
        scoring={"extract": "text"},
    )
    run("--limit", "1")
    assert run()["deduplicated"] == 0


def test_other_runs_are_reused() -> None:
    prepare(6)
    run("--limit", "4", name="b")
    summary = run("--reuse", str(OTHER))
    assert (summary["reused"], summary["ok"]) == (4, 6)
    found, then = by_row(), by_row(OTHER)
    for n in range(4):
        assert found[n]["text"] == then[n]["text"]
        assert Path(found[n]["reused_from"]).samefile(OTHER)
        assert found[n]["usage"] is None
    assert "reused_from" not in found[4]


def test_a_reused_run_may_have_another_prompt_if_the_requests_are_equal() -> None:
    write_rows([{"key": "k", "q": "question 0"}])
    write_job()
    run(name="b")
    write_job(prompt={"user": "question {{ number }}"})
    write_rows([{"number": 0}])
    assert run("--reuse", str(OTHER))["reused"] == 1
    assert (
        run("--reuse", str(OTHER), "--set", "prompt.user=other {{ number }}", name="c")["reused"]
        == 0
    )


@pytest.mark.parametrize(
    "change", ["engine.options.latency_s=0.001", "task=embed", "media.max_pixels=9"]
)
def test_runs_with_another_identity_are_not_reused(change: str) -> None:
    prepare(2)
    run(name="b")
    ended = dry_runs.run("--reuse", str(OTHER), "--set", change).ok()
    assert ended.json["reused"] == 0
    assert f"nothing is reused from {OTHER.absolute()}, whose run differs" in ended.stderr


@pytest.mark.parametrize(
    ("folder", "fault"),
    [("output/none", "not a run folder"), ("output/a", "is the folder of this run")],
)
def test_a_folder_that_cannot_be_reused_is_refused(folder: str, fault: str) -> None:
    prepare(2)
    run()
    assert fault in dry_runs.run("--reuse", folder).refused()


@pytest.mark.slow
def test_kills_between_an_answer_and_its_copies_compute_nothing_twice() -> None:
    chosen = random.Random(7)
    questions = [f"question {n}" for n in range(60)] + [
        f"question {chosen.randrange(60)}" for _ in range(40)
    ]
    chosen.shuffle(questions)
    rows = [{"key": n, "q": q} for n, q in enumerate(questions)]
    with serving(latency_s=0.02) as server:
        prompt, flow = {"user": "{{ q }}"}, {"max_in_flight": 4}
        scripted.write_job(server, rows, input={"id": "key"}, prompt=prompt, run=flow)
        for kill in range(1, 11):
            with own_process.begin("run", "job.toml", cwd=Path()) as process:
                until(lambda n=kill: _n_lines() >= 8 * n or process.poll() is not None)
                process.kill()
        batchkit("run", "job.toml").ok()
    found = scripted.records()
    assert len(found) == _n_lines() == 100
    assert all(row["q"] in found[str(row["key"])]["text"] for row in rows)
    assert sum("duplicate_of" in record for record in found.values()) == 40
    in_flight = 10 * 4  # requests that the kills have lost
    assert 60 <= server.answered.total() <= 60 + in_flight


def _n_lines() -> int:
    log = RUN / "results.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_plan_counts_the_rows_that_would_be_copied() -> None:
    rows_with("x", "y", "z")
    write_job()
    run(name="b")
    rows_with("x", "y", "new", "newer", "new", "new")
    planned = batchkit("plan", "job.toml", "--json", "--set", f'run.reuse=["{OTHER}"]').ok().json
    assert planned["copied"] == {"deduplicated": 2, "reused": 2}
    assert (
        planned["completion_tokens"]["expected"]
        == 2 * by_row(OTHER)[0]["usage"]["completion_tokens"]
    )
    assert run("--reuse", str(OTHER))["reused"] == 2


def test_copies_have_no_tokens_in_an_openai_export() -> None:
    rows_with("x", "x")
    write_job()
    run()
    batchkit("export", RUN, "--openai").ok()
    first, copy = read_jsonl(RUN / "results.openai.jsonl")
    assert first["response"]["body"]["usage"]["total_tokens"] > 0
    assert copy["response"]["body"]["usage"]["total_tokens"] == 0


def test_expected_lengths_are_kept_for_the_next_start() -> None:
    prepare(302)
    run("--limit", "300")
    (n_rows, total) = json.loads((RUN / "forecast.json").read_text())["answer_lengths"][""]
    assert (n_rows, total) == (300, sum(r["usage"]["completion_tokens"] for r in records()))
    run()
    assert json.loads((RUN / "forecast.json").read_text())["answer_lengths"][""][0] == 302


def test_rows_that_another_run_answered_come_last() -> None:
    prepare(8)
    run("--limit", "5", name="b")
    run("--reuse", str(OTHER), "--set", "run.order=input")
    assert [record["index"] for record in records()] == [5, 6, 7, 0, 1, 2, 3, 4]


def test_a_run_ends_well_if_lengths_cannot_be_stored() -> None:
    prepare(300)
    run("--limit", "1")
    (RUN / "forecast.json").mkdir()
    assert run()["ok"] == 300


def test_plan_leaves_the_index_of_a_reused_run_to_its_sample() -> None:
    prepare(12)
    run("--limit", "6", name="b")
    batchkit("plan", "job.toml", "--json", "--set", f'run.reuse=["{OTHER}"]').ok()
    file = os.open(OTHER / "answers.index", os.O_RDWR)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(file)
