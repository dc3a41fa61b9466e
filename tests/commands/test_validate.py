"""``validate`` and ``run --dry-run``: likely mistakes, and jobs with several generations a row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from batchkit.commands.validate import validate
from tests.support.command_line import batchkit
from tests.support.dry_runs import job as job_of
from tests.support.rows import write_jsonl

Job = dict[str, Any]
LATER = (
    "[[steps]]: rows are checked with their first prompt, of step draft unless it is skipped. Prompts of"
    " judge, revise contain answers: their templates and parameters are checked, their lengths and images are not"
)


@pytest.fixture(autouse=True)
def _in_a_folder_with_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "in.jsonl", [{"id": "x", "q": f"q{n}"} for n in range(3)])


@pytest.mark.parametrize("max_tokens", [100, 512, 4096])
def test_max_tokens_beyond_max_model_len_are_found(max_tokens: int, text_model: Path) -> None:
    Path("in.txt").write_text("one\ntwo\n")
    engine = {"kind": "transformers", "model": str(text_model), "options": {"max_model_len": 512}}
    made = job_of(input={"path": "in.txt"}, engine=engine, sampling={"max_tokens": max_tokens})
    found = validate(made)
    assert (found.ok, found.failed) == (2, 0)
    assert any(
        f"sampling.max_tokens: {max_tokens} leaves no room" in hint for hint in found.hints
    ) == (max_tokens >= 512)


def steps() -> Job:
    return {
        "name": "a",
        "input": {"path": "in.jsonl"},
        "engine": {"kind": "dry-run"},
        "engines": {"small": {"kind": "dry-run"}},
        "steps": [
            {"name": "draft", "engine": "small", "prompt": {"user": "draft {{ q }}"}},
            {"name": "judge", "prompt": {"user": "judge {{ steps.draft.text }}"}},
            {
                "name": "revise",
                "when": "{{ steps.judge.text | length > 3 }}",
                "prompt": {"user": "revise {{ steps.draft.text }}"},
            },
        ],
    }


def rollout(function: str, code: str) -> Job:
    Path("solve.py").write_text(code)
    return {
        "name": "a",
        "input": {"path": "in.jsonl"},
        "engine": {"kind": "dry-run"},
        "rollout": {"function": function},
    }


def checked(job: Job, *command: str) -> Any:
    Path("job.toml").write_text(tomlkit.dumps(job))
    return batchkit(*(command or ("validate",)), "job.toml")


def test_rows_are_checked_with_the_first_step() -> None:
    job = steps()
    job["steps"][0]["prompt"]["user"] = "{{ missing }}"
    found = checked(job, "validate", "--json")
    assert found.exit_code == 3
    assert found.json["failed_by_kind"] == {"template": 3}
    assert "'missing' is undefined" in found.json["problems"][0]["message"]


def test_a_first_step_that_is_skipped_is_not_checked(text_model: Path) -> None:
    """The next one is, with its own engine; neither is a reason not to begin."""
    rows = [{"q": "q0"}, {"q": "q1", "photo": "gone.png"}, {"q": "word " * 2000}]
    write_jsonl(Path("in.jsonl"), rows)
    job = steps()
    look = {
        "name": "look",
        "when": "{{ photo is defined }}",
        "prompt": {"user": "{{ photo }}", "images": ["{{ photo }}"]},
    }
    job["steps"].insert(0, look)
    options = {"max_model_len": 512}
    job["engines"]["small"] = {"kind": "transformers", "model": str(text_model), "options": options}
    job["sampling"] = {"max_tokens": 16}
    found = checked(job, "validate", "--json")
    assert found.json["failed_by_kind"] == {"media": 1, "prompt_too_long": 1}
    shown = checked(job, "run", "--dry-run").stdout
    assert "row 0 (id 0), step draft" in shown
    job["engines"]["small"] = {"kind": "dry-run"}
    assert checked(job, "run", "--set", "run.check_rows=1").json["ok"] == 2


def test_a_row_that_skips_all_steps_would_fail() -> None:
    job = steps()
    job["steps"] = [{**job["steps"][0], "when": "{{ q == 'q1' }}"}]
    for command in (("validate", "--json"), ("run",)):
        assert checked(job, *command).json["failed_by_kind"] == {"empty": 2}


def test_a_good_job_says_what_only_a_run_shows() -> None:
    found = checked(steps(), "validate", "--json")
    assert found.json["ok"] == 3
    assert found.json["not_checked"] == [LATER]
    assert found.json["hints"] == []
    assert LATER in checked(steps()).stdout
    one = {**steps(), "steps": steps()["steps"][:1]}
    assert checked(one, "validate", "--json").json["not_checked"] == []


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("prompt", {"user": "{{ qq }}"}, "steps.revise: the first row has no field 'qq'"),
        ("prompt", {"user": "x", "images": ["{{ im }}"]}, "the first row has no field 'im'"),
        ("when", "{{ qq }}", "steps.revise: the first row has no field 'qq'"),
        (
            "sampling",
            {"sampling_column": "qq"},
            "steps.revise.sampling.sampling_column: the first row has no field 'qq'",
        ),
        ("reference", "qq", "steps.revise: the rows have no field 'qq'"),
        ("scorers", ["em"], "steps.revise: em needs a right answer to compare with: set"),
    ],
)
def test_a_field_of_a_later_step_that_the_first_row_lacks_is_found(
    key: str, value: Any, hint: str
) -> None:
    job = steps()
    job["steps"][2] |= {key: value, **({"extract": "number"} if key == "reference" else {})}
    for command in ("validate", "run"):
        found = checked(job, command)
        assert hint in found.stdout + found.stderr


def test_a_field_that_answers_hide_is_found() -> None:
    write_jsonl(Path("in.jsonl"), [{"q": "a", "steps": 1}])
    assert "[[steps]]: rows have a field 'steps'" in checked(steps()).stdout


@pytest.mark.parametrize(
    ("step", "table", "found"),
    [
        (2, {"sampling": {"max_tokenz": 3}}, "steps.revise: "),
        (0, {"sampling": {"top_k": "x"}}, "steps.draft: "),
    ],
)
def test_parameters_of_each_step_are_checked(
    step: int, table: Job, found: str, text_model: Path
) -> None:
    job = steps()
    job["engine"] = job["engines"]["small"] = {"kind": "transformers", "model": str(text_model)}
    assert checked(job).exit_code == 0
    job["steps"][step] |= table
    refused = checked(job).refused()
    assert found in refused
    assert next(iter(table["sampling"])) in refused


def test_a_first_prompt_that_is_too_long_is_cut_as_the_run_cuts_it(text_model: Path) -> None:
    write_jsonl(Path("in.jsonl"), [{"q": "word " * 2000}])
    job = steps()
    engine = {"kind": "transformers", "model": str(text_model), "options": {"max_model_len": 512}}
    job["engine"] = job["engines"]["small"] = engine
    job["sampling"] = {"max_tokens": 16}
    assert checked(job, "validate", "--json").json["failed_by_kind"] == {"prompt_too_long": 1}
    job["retry"] = {"on_too_long": "truncate-middle"}
    assert checked(job, "validate", "--json").json["failed"] == 0


def test_dry_run_shows_the_first_step() -> None:
    shown = checked(steps(), "run", "--dry-run").ok()
    assert shown.stdout.startswith("--- row 0 (id 0), step draft\n")
    assert shown.stdout.count("user: draft q") == 3
    assert LATER in shown.stderr
    assert not Path("output").exists()


# Rollouts


def test_rows_of_a_rollout_are_read() -> None:
    Path("in.jsonl").write_text('{"q": "a"}\nnot json\n{"q": "b"}\n')
    found = checked(
        rollout("solve.py:go", "async def go(row, generate): ..."), "validate", "--json"
    )
    assert (found.json["ok"], found.json["failed"]) == (2, 1)
    (line,) = found.json["not_checked"]
    assert line.startswith("[rollout]: rows were read and the function was imported; ")


def test_dry_run_shows_what_the_function_gets() -> None:
    shown = checked(rollout("solve.py:go", "async def go(row, generate): ..."), "run", "--dry-run")
    rows = [line.partition(": ")[2] for line in shown.stdout.splitlines() if "gets" in line]
    assert [json.loads(row) for row in rows] == [{"id": "x", "q": f"q{n}"} for n in range(3)]


@pytest.mark.parametrize("command", ["validate", "run"])
@pytest.mark.parametrize(
    ("function", "code", "found"),
    [
        ("gone.py:go", "", "gone.py: no such file"),
        ("no_such_module_of_mine:go", "", "no module 'no_such_module_of_mine'"),
        ("solve.py:go", "x = 1/0", "ZeroDivisionError: division by zero"),
        ("solve.py:go", "async def gone(row, generate): ...", "found nothing as go in "),
        ("solve.py:go", "def go(row, generate): ...", "expected a function `async def go(row"),
        ("solve.py:go", "async def go(row): ...", "go(row) in "),
        (
            "solve.py:go",
            "async def go(row, generate, *, tools): ...",
            "missing a required argument: 'tools'",
        ),
    ],
)
def test_a_function_that_can_not_be_called_is_refused(
    command: str, function: str, code: str, found: str
) -> None:
    refused = checked(rollout(function, code), command).refused()
    assert "rollout.function: " in refused
    assert found in refused
