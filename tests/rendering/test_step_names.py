"""What the templates of ``[[steps]]`` may name, and how their errors name the step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from tests.support.command_line import batchkit
from tests.support.rows import read_jsonl, write_jsonl

SEES = "a template can use the steps before its own step: draft"
ALL = "text, reasoning, tool_calls, json, choices, selected, votes, finish_reason, skipped, prediction"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "in.jsonl", [{"q": "a"}])


def write_job(second: dict[str, Any], first: dict[str, Any] | None = None, **tables: Any) -> None:
    draft = {"name": "draft", "prompt": {"user": "{{ q }}"}, **(first or {})}
    revise = {"name": "revise", "prompt": {"user": "Shorten {{ steps.draft.text }}"}, **second}
    last = {"name": "last", "prompt": {"user": "{{ q }}"}}
    given = {"name": "a", "input": {"path": "in.jsonl"}, "engine": {"kind": "dry-run"}}
    Path("job.toml").write_text(tomlkit.dumps({**given, "steps": [draft, revise, last], **tables}))


@pytest.mark.parametrize("command", [("validate",), ("run",), ("run", "--dry-run")])
@pytest.mark.parametrize(
    ("key", "template", "found"),
    [
        (
            "when",
            "{{ steps.darft.text }}",
            "steps.darft is not an earlier step; did you mean 'draft'",
        ),
        ("when", "{{ steps.last.text }}", f"steps.last is not an earlier step; {SEES}"),
        (
            "prompt.system",
            "{{ steps['revise']['text'] }}",
            f"steps.revise is not an earlier step; {SEES}",
        ),
        ("prompt.images.0", "{{ steps.draft.txt }}", "steps.draft has no 'txt'; did you mean 'te"),
        (
            "prompt.texts.a",
            "{{ steps.draft.of_model }}",
            f"steps.draft has no 'of_model'; it has {ALL}",
        ),
        ("when", "{{ steps.draft.prediction == 'x' }}", "steps.draft has no 'prediction', because"),
        ("prompt.user", "{{ steps.draft.text", "line 1: unexpected end of template, expected 'end"),
        ("prompt.user_file", "gone.j2", "FOLDER/gone.j2: can't be read: No such file or directory"),
    ],
)
def test_a_name_that_no_step_before_has_is_refused(
    key: str, template: str, found: str, command: tuple[str, ...], tmp_path: Path
) -> None:
    second: dict[str, Any] = {"prompt": {} if key.startswith("prompt.user") else {"user": "x"}}
    match key.split("."):
        case [name]:
            second[name] = template
        case [_, name]:
            second["prompt"][name] = template
        case [_, name, place]:
            second["prompt"][name] = [template] if place == "0" else {place: template}
    write_job(second)
    done = batchkit(*command, "job.toml")
    assert done.exit_code == 2
    assert f"steps.revise.{key}: {found.replace('FOLDER', str(tmp_path))}" in done.stderr
    assert not Path("output").exists()


@pytest.mark.parametrize(
    "template",
    [
        "{% for name, answer in steps.items() %}{{ name }} {{ answer.text }}{% endfor %}",
        "{{ steps[which].text }} {{ steps.get('x', 1) }}",
        "{% if steps.draft.reasoning is defined %}{{ steps.draft.reasoning }}{% endif %}{{ q }}",
        "{% set steps = {'x': {'text': 1}} %}{{ steps.x.text }}",
        "{% if not steps.draft.skipped %}{{ steps.draft.text | upper }}{% endif %}",
        "{{ steps.draft.json.anything }}{{ steps.draft.choices[0] }}",
    ],
)
def test_what_can_be_read_is_not_refused(template: str) -> None:
    write_job({"prompt": {"user": template}}, vars={"which": "draft"})
    assert batchkit("validate", "job.toml").exit_code == 0


@pytest.mark.parametrize(
    "template", ["{{ steps }}", "{% for x in steps %}{{ x }}{% endfor %}{{ q }}"]
)
@pytest.mark.parametrize("place", ["first", "second"])
def test_a_rows_own_field_called_steps_is_not_taken_for_answers(place: str, template: str) -> None:
    write_job(**{"second": {}, place: {"prompt": {"user": template}}})
    write_jsonl(Path("in.jsonl"), [{"q": "a"}, {"q": "b", "steps": ["mix", "bake"]}])
    assert batchkit("run", "job.toml").exit_code == 3
    good, bad = sorted(read_jsonl(Path("output/a/results.jsonl")), key=lambda r: r["index"])
    assert (good["status"], bad["error"]["kind"]) == ("ok", "template")
    step = {"first": "draft", "second": "revise"}[place]
    problem = f"steps.{step}.prompt.user: the row has a field 'steps', but in templates this name"
    assert bad["error"]["message"].startswith(problem)


def test_a_step_that_was_skipped_shows() -> None:
    user = "{{ 'none' if steps.draft.skipped else steps.draft.text }}"
    write_job({"prompt": {"user": user}}, {"when": "{{ q == 'b' }}"})
    write_jsonl(Path("in.jsonl"), [{"q": "a"}, {"q": "b"}])
    assert batchkit("run", "job.toml").exit_code == 0
    skipped, asked = read_jsonl(Path("output/a/results.jsonl"))
    assert skipped["steps"]["draft"] == {"skipped": True}
    assert "skipped" not in json.dumps(asked)


def test_an_error_in_a_template_names_its_step() -> None:
    write_job({"prompt": {"user": "{{ steps.draft.json.key }}"}})
    assert batchkit("run", "job.toml").exit_code == 3
    (record,) = read_jsonl(Path("output/a/results.jsonl"))
    assert record["error"]["kind"] == "template"
    assert record["error"]["message"].startswith("step revise: ")
