"""What people see of rows with several generations: the report, ``show``, progress and metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomlkit

from batchkit.storage.metrics import read_metrics
from tests.support.browser import open_browser
from tests.support.command_line import Ended, batchkit
from tests.support.dry_runs import RUN, write_rows
from tests.support.pages import data_in

pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.browser]
STEPS: list[dict[str, Any]] = [
    {
        "name": "draft",
        "prompt": {"user": "{{ q }}"},
        "extract": "number",
        "reference": "a",
        "scorers": ["em"],
    },
    {"name": "check", "prompt": {"user": "check"}, "when": "{{ steps.draft.scores.em < 1 }}"},
    {"name": "end", "prompt": {"user": "{{ steps.draft.text }}"}},
]
SOLVE = """
async def solve(row, generate):
    first = await generate(row["q"])
    if row["q"] == "q1":
        raise ValueError("no idea")
    checks = await generate.many(["a", "b"] * row["n"], step="check")
    return f"{first.text} {len(checks)}"
"""


def run(**tables: Any) -> Ended:
    """The answer to row n ends in n; row 1 expects that."""
    write_rows([{"q": f"q{k}", "a": "1", "n": 1 if k else 15} for k in range(3)])
    job = {"name": "a", "input": {"path": "in.jsonl"}, "engine": {"kind": "dry-run"}, **tables}
    Path("job.toml").write_text(tomlkit.dumps(job))
    Path("solve.py").write_text(SOLVE)
    return batchkit("run", "job.toml")


def page() -> Any:
    assert batchkit("report").exit_code == 0
    return data_in(RUN / "report.html")


def of_steps(row: dict[str, Any], *names: str) -> list[dict[str, Any]]:
    """Of each step of a row, what it has of ``names``."""
    return [{name: step[name] for name in names if name in step} for step in row["steps"]]


def test_the_page_has_what_each_step_answered() -> None:
    assert run(steps=STEPS).exit_code == 0
    found = page()
    first, second, _ = found["rows"]
    said = "dry-run: no model answered row 0"
    assert of_steps(first, "step", "text", "prediction", "scores") == [
        {"step": "draft", "text": said, "prediction": "0", "scores": {"em": 0.0}},
        {"step": "check", "text": said},
        {"step": "end", "text": said},
    ]
    assert first["steps"][1]["usage"] == {"prompt_tokens": 2, "completion_tokens": 6}
    assert second["steps"][1] == {"step": "check", "skipped": True}
    counts = {"generations": 2, "failed": 0, "prompt_tokens": 4, "completion_tokens": 12}
    assert found["about"]["steps"]["check"] == counts
    assert found["status"]["generations"] == 8
    assert ["Steps", "draft → check → end"] in found["about"]["origin"]


def test_the_page_has_the_first_generations_of_a_function() -> None:
    assert run(rollout={"function": "solve.py:solve"}).exit_code == 3
    many, failed, few = page()["rows"]
    calls = [(step["step"], step["call"]) for step in few["steps"]]
    assert calls == [("", 0), ("check", 0), ("check", 1)]
    assert (len(many["steps"]), many["steps"][-1]) == (21, {"more": 11})
    assert of_steps(failed, "step", "text") == [
        {"step": "", "text": "dry-run: no model answered row 1"}
    ]
    assert "no idea" in failed["record"]["error"]["message"]


def test_steps_are_text_in_a_browser() -> None:
    hostile = {"name": "end", "prompt": {"user": "x"}, "when": "{{ q != 'q1' }}"}
    assert run(steps=[STEPS[0], hostile]).exit_code == 0
    log = RUN / "results.jsonl"
    text = "<b onclick='x'>bold</b>"
    log.write_text(log.read_text().replace("no model answered row 0", text))
    (RUN / "checkpoint.json").unlink()
    page()
    with open_browser() as browser:
        opened = browser.new_page()
        opened.goto((RUN / "report.html").absolute().as_uri())
        steps = opened.locator("#detail .step")
        steps.first.wait_for()
        assert steps.nth(0).locator("header").inner_text().split()[:5] == [
            *("draft", "prediction:", "0", "em", "0")
        ]
        assert text in steps.nth(1).inner_text()
        assert not opened.locator("#detail .step b").count()
        opened.keyboard.press("j")
        opened.locator("#detail .step").filter(has_text="skipped").wait_for()


def test_show_has_each_generation() -> None:
    run(steps=STEPS)
    _, first, second, _ = batchkit("show").stdout.split("--- ")
    assert first.splitlines()[1:-1] == [
        "user: q0",
        *(f"{step}: dry-run: no model answered row 0" for step in ("draft", "check", "end")),
        "→ dry-run: no model answered row 0",
    ]
    assert "check: skipped" in second
    assert "2 generations" in second


def test_show_has_the_calls_of_a_function() -> None:
    run(rollout={"function": "solve.py:solve"})
    lines = batchkit("show", "--id", "2").stdout.splitlines()
    said = "dry-run: no model answered row 2"
    assert [f"call 1: {said}", f"check: {said}", f"check, call 2: {said}"] == lines[4:7]
    (row,) = batchkit("show", "--id", "2", "--json").json["rows"]
    assert [call["step"] for call in row["calls"]] == ["", "check", "check"]


def test_rows_and_generations_are_counted() -> None:
    ended = run(steps=STEPS)
    assert ended.json["generations"] == 8
    assert "3 of 3 rows, 8 generations" in ended.stderr
    assert "0 failed of 3 rows, 8 generations" in ended.stderr
    assert read_metrics(RUN)[-1].generations == 8
    again = batchkit("run", "job.toml")
    assert again.json["generations"] == 8


def test_what_was_selected_is_shown() -> None:
    steps = [{"name": "end", "prompt": {"user": "?"}, "sampling": {"n": 3}}]
    run(
        steps=steps,
        scoring={"extract": "number"},
        select={"by": "majority"},
        output={"choices": True},
    )
    assert "answer 1 was chosen by 3 of 3 votes" in batchkit("show", "-n", "1").stdout
    first, *_ = page()["rows"]
    assert len(first["answers"]) == 3
    assert first["record"]["selected"] == 0
