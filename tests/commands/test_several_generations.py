"""Commands that read one answer of a row, on rows with several generations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest
import tomlkit

from batchkit.storage.score_store import read_scored
from tests.support.command_line import Ended, batchkit
from tests.support.dry_runs import LOG, RUN, records, write_rows

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
STEPS = [
    {"name": "draft", "prompt": {"user": "{{ q }}"}, "extract": "number"},
    {"name": "end", "prompt": {"user": "{{ steps.draft.text }}"}},
]
SCORING = {"extract": "number", "reference": "a", "scorers": ["em"]}


def write_job(name: str = "a", **tables: Any) -> None:
    job = {"name": name, "input": {"path": "in.jsonl"}, "engine": {"kind": "dry-run"}, **tables}
    Path("job.toml").write_text(tomlkit.dumps(job))


def run(name: str = "a", **tables: Any) -> Ended:
    """The answer to row n ends in n; row 1 expects that."""
    write_rows([{"q": f"q{k}", "a": "1"} for k in range(3)])
    write_job(name, **tables)
    ended = batchkit("run", "job.toml")
    assert ended.exit_code == 0, ended.stderr
    return ended


def choose_the_second() -> None:
    """As if the model had said three things, of which the second was selected."""
    changed = []
    for record in records():
        texts = ["one", record["text"], "three"]
        record["choices"] = [{"text": text, "finish_reason": "stop"} for text in texts]
        changed.append(record | {"selected": 1})
    LOG.write_bytes(
        b"".join(orjson.dumps(one, option=orjson.OPT_APPEND_NEWLINE) for one in changed)
    )
    (RUN / "checkpoint.json").unlink()


def test_openais_format_has_the_answer_that_was_selected() -> None:
    run(steps=STEPS, output={"choices": True})
    choose_the_second()
    assert batchkit("export", "--openai", "out.jsonl").exit_code == 0
    for n, line in enumerate(Path("out.jsonl").read_text().splitlines()):
        body = json.loads(line)["response"]["body"]
        (choice,) = body["choices"]
        assert choice["message"]["content"] == f"dry-run: no model answered row {n}"
        assert choice["index"] == 0
        assert body["usage"]["completion_tokens"] == 12  # of both steps


def test_the_harness_format_has_the_rows_answer() -> None:
    run(steps=STEPS)
    Path("out").mkdir()
    assert batchkit("export", "--realhit", "out").exit_code == 0
    (path,) = Path("out").glob("results_*.json")
    said = [result["Prediction"] for result in json.loads(path.read_text())["results"]]
    assert said == [f"dry-run: no model answered row {n}" for n in range(3)]


def test_scoring_again_reads_the_rows_answer_and_keeps_its_steps() -> None:
    run(steps=STEPS)
    before = {record["index"]: record["steps"] for record in records()}
    write_job(steps=STEPS, scoring=SCORING)
    ended = batchkit("score", "job.toml", "--json")
    assert ended.exit_code == 0, ended.stderr
    assert ended.json["overall"]["em"] == pytest.approx(100 / 3, abs=0.01)
    scored = list(read_scored(RUN))
    assert [record["scores"] for record in scored] == [{"em": 0.0}, {"em": 1.0}, {"em": 0.0}]
    assert {record["index"]: record["steps"] for record in scored} == before


def test_two_runs_are_compared_by_their_answers() -> None:
    run(steps=STEPS, scoring=SCORING)
    run("b", prompt={"user": "{{ q }}"}, scoring=SCORING)
    ended = batchkit("report", "output/a", "output/b", "--json")
    assert ended.exit_code == 0, ended.stderr
    tables = ended.json["tables"]
    assert tables["a"]["overall"] == tables["b"]["overall"]
    assert tables["a"]["overall"]["n"] == 3


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"steps": STEPS}, "[[steps]]: parity compares two answers to one prompt"),
        ({"rollout": {"function": "solve.py:solve"}}, "[rollout]: parity compares"),
    ],
    ids=["steps", "rollout"],
)
def test_parity_refuses_rows_with_several_answers(tables: dict[str, Any], message: str) -> None:
    write_rows(2)
    write_job(**tables)
    ended = batchkit("parity", "job.toml", "--engines", "dry-run,dry-run")
    assert ended.exit_code == 2
    assert message in ended.stderr


def test_batch_sizes_are_measured_with_the_first_step() -> None:
    write_rows(60)
    write_job(steps=STEPS)
    ended = batchkit(
        "bench", "job.toml", "--batch-sizes", "4", "--rounds", "1", "--seconds", "1", "--json"
    )
    assert ended.exit_code == 0, ended.stderr
    assert "measured is step 'draft', the first of 2" in ended.stderr
    assert ended.json["batch_sizes"][0]["rows_per_s"] > 0


@pytest.mark.parametrize("command", [["bench", "--batch-sizes", "4"], ["find-bs"]], ids=str)
@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"rollout": {"function": "solve.py:solve"}}, "[rollout]: what its function asks for"),
        (
            {
                "steps": [{**STEPS[0], "engine": "small"}],
                "engines": {"small": {"kind": "dry-run"}},
            },
            "steps.draft.engine: the first step runs on [engines.small]",
        ),
    ],
    ids=["rollout", "engine"],
)
def test_what_can_not_be_measured_is_said(
    command: list[str], tables: dict[str, Any], message: str
) -> None:
    write_rows(2)
    write_job(**tables)
    ended = batchkit(command[0], "job.toml", *command[1:])
    assert ended.exit_code == 2
    assert message in ended.stderr
