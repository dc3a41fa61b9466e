"""Rows with several generations, as the commands that read show them and count them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchkit.storage.metrics import read_metrics
from batchkit.storage.score_store import read_scored
from tests.support.command_line import Ended, batchkit
from tests.support.dry_runs import RUN, records, write_job, write_rows
from tests.support.pages import data_in
from tests.support.scored_runs import NUMBER

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
STEPS: list[dict[str, Any]] = [
    {"name": "draft", "prompt": {"user": "{{ q }}"}, **NUMBER},
    {"name": "check", "prompt": {"user": "check"}, "when": "{{ steps.draft.scores.em < 1 }}"},
    {"name": "end", "prompt": {"user": "{{ steps.draft.text }}"}},
]
FUNCTION = {"rollout": {"function": "solve.py:solve"}}
SOLVE = """
async def solve(row, generate):
    first = await generate(row["q"])
    if row["q"] == "q1":
        raise ValueError("no idea")
    checks = await generate.many(["a", "b"] * row["n"], step="check")
    return f"{first.text} {len(checks)}"
"""
SAID = [f"dry-run: no model answered row {n}" for n in range(3)]


def run(**tables: Any) -> Ended:
    """The answer to row n ends in n; row 1 expects that."""
    write_rows([{"q": f"q{k}", "a": "1", "n": 1 if k else 15} for k in range(3)])
    Path("solve.py").write_text(SOLVE)
    write_job(**{"prompt": None, **tables})
    return batchkit("run", "job.toml")


def page() -> Any:
    assert batchkit("report").exit_code == 0
    return data_in(RUN / "report.html")


def of_steps(row: dict[str, Any], *names: str) -> list[dict[str, Any]]:
    """Of each step of a row, what it has of ``names``."""
    return [{name: step[name] for name in names if name in step} for step in row["steps"]]


def test_steps_are_counted_and_shown() -> None:
    ended = run(steps=STEPS)
    assert ended.json["generations"] == 8
    assert "3 of 3 rows, 8 generations" in ended.stderr
    assert "0 failed of 3 rows, 8 generations" in ended.stderr
    assert read_metrics(RUN)[-1].generations == 8
    assert batchkit("run", "job.toml").json["generations"] == 8
    found = page()
    first, second, _ = found["rows"]
    assert of_steps(first, "step", "text", "prediction", "scores") == [
        {"step": "draft", "text": SAID[0], "prediction": "0", "scores": {"em": 0.0}},
        {"step": "check", "text": SAID[0]},
        {"step": "end", "text": SAID[0]},
    ]
    assert first["steps"][1]["usage"] == {"prompt_tokens": 2, "completion_tokens": 6}
    assert second["steps"][1] == {"step": "check", "skipped": True}
    counts = {"generations": 2, "failed": 0, "prompt_tokens": 4, "completion_tokens": 12}
    assert found["about"]["steps"]["check"] == counts
    assert found["status"]["generations"] == 8
    assert ["Steps", "draft → check → end"] in found["about"]["origin"]
    _, one, two, _ = batchkit("show").stdout.split("--- ")
    lines = [*(f"{step}: {SAID[0]}" for step in ("draft", "check", "end")), f"→ {SAID[0]}"]
    assert one.splitlines()[1:-1] == ["user: q0", *lines]
    assert "check: skipped" in two
    assert "2 generations" in two


def test_the_calls_of_a_function_are_shown_and_of_many_the_first() -> None:
    assert run(**FUNCTION).exit_code == 3
    many, failed, few = page()["rows"]
    calls = [(step["step"], step["call"]) for step in few["steps"]]
    assert calls == [("", 0), ("check", 0), ("check", 1)]
    assert (len(many["steps"]), many["steps"][-1]) == (21, {"more": 11})
    assert of_steps(failed, "step", "text") == [{"step": "", "text": SAID[1]}]
    assert "no idea" in failed["record"]["error"]["message"]
    lines = batchkit("show", "--id", "2").stdout.splitlines()
    wanted = [f"{call}: {SAID[2]}" for call in ("call 1", "check", "check, call 2")]
    assert [line for line in lines if "call" in line or "check" in line][:3] == wanted
    (row,) = batchkit("show", "--id", "2", "--json").json["rows"]
    assert [call["step"] for call in row["calls"]] == ["", "check", "check"]


def test_what_was_selected_is_shown() -> None:
    steps = [{"name": "end", "prompt": {"user": "{{ q }}?"}, "sampling": {"n": 3}}]
    tables: dict[str, Any] = {"scoring": {"extract": "number"}, "select": {"by": "majority"}}
    run(steps=steps, output={"choices": True}, **tables)
    assert "answer 1 was chosen by 3 of 3 votes" in batchkit("show", "-n", "1").stdout
    first, *_ = page()["rows"]
    assert len(first["answers"]) == 3
    assert first["record"]["selected"] == 0


def test_scoring_again_reads_the_rows_answer_and_keeps_its_steps() -> None:
    run(steps=STEPS)
    before = {record["index"]: record["steps"] for record in records()}
    write_job(prompt=None, steps=STEPS, scoring=NUMBER)
    ended = batchkit("score", "job.toml", "--json").ok()
    assert ended.json["overall"]["em"] == pytest.approx(100 / 3, abs=0.01)
    scored = list(read_scored(RUN))
    assert [record["scores"] for record in scored] == [{"em": 0.0}, {"em": 1.0}, {"em": 0.0}]
    assert {record["index"]: record["steps"] for record in scored} == before


def test_two_runs_are_compared_by_their_answers() -> None:
    run(steps=STEPS, scoring=NUMBER)
    run(name="b", prompt={"user": "{{ q }}"}, scoring=NUMBER)
    found = batchkit("compare", "output/a", "output/b", "--json").json
    assert found["tables"]["a"]["overall"] == found["tables"]["b"]["overall"]
    assert found["tables"]["a"]["overall"]["n"] == 3
    assert "more differences" in found["warnings"][-1]


def test_batch_sizes_are_measured_with_all_steps_of_one_engine() -> None:
    write_rows(60)
    steps = [STEPS[0], STEPS[2]]
    write_job(prompt=None, steps=steps, engine={"options": {"latency_s": 0.01}})
    options = ("--low", "4", "--high", "4", "--seconds", "1", "--json")
    ended = batchkit("find-bs", "job.toml", *options).ok()
    assert ended.json["batch_sizes"][0]["rows_per_s"] > 0
    two = [{**STEPS[0], "engine": "small"}, STEPS[2]]
    write_job(prompt=None, steps=two, engines={"small": {"kind": "dry-run"}})
    assert "[engines]: only one engine can be measured" in batchkit("find-bs", "job.toml").refused()
