"""``batchkit score`` takes predictions from elsewhere, and another run's answers as references."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from batchkit.commands.export import export
from batchkit.commands.run import run_job
from batchkit.commands.score import score_run
from batchkit.commands.score.predictions import score_predictions
from batchkit.config.export_target import Target
from batchkit.config.loading import make_job
from batchkit.errors import JobError
from batchkit.storage.job_toml import job_of_run
from tests.support.command_line import batchkit
from tests.support.rows import write_jsonl
from tests.support.scored_runs import ROWS, completion, counted, job, quiet, run, scored, table

pytestmark = pytest.mark.slow

# Predictions that were made elsewhere

HARNESS = {
    "config": {"total_queries": 3, "throughput": math.nan},
    "results": [
        {"id": "q1", "QuestionType": "Facts", "Prediction": "1955, 62170", "Metrics": {}},
        {"id": "q2", "QuestionType": "Facts", "Prediction": "[ERROR] OOM: too large"},
        {"id": "q3", "QuestionType": "Facts", "Prediction": "35 to 39 years"},
    ],
}
RESULTS_OF_OURS = [
    {"index": 0, "id": "q1", "status": "failed", "text": None, "prediction": None},
    {"index": 0, "id": "q1", "status": "ok", "text": "?", "prediction": "1955, 62170"},
    {"index": 1, "id": "q2", "status": "failed", "text": None},
    {"index": 2, "id": "q3", "status": "ok", "text": "[Final Answer]: 35 to 39 years"},
]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("results.json", json.dumps(HARNESS)),
        ("results.json", json.dumps(HARNESS, indent=2)),
        ("list.json", json.dumps(HARNESS["results"], indent=1)),
        ("results.jsonl", "\n".join(map(json.dumps, RESULTS_OF_OURS))),
        ("bom.jsonl", "\ufeff" + "\n\n".join(map(json.dumps, RESULTS_OF_OURS))),
        (
            "plain.jsonl",
            """{"id": "q1", "text": "[Final Answer]: 1955, 62170"}
            {"id": "q2", "prediction": null}
            {"id": "q3", "prediction": "35 to 39 years"}""",
        ),
    ],
)
def test_predictions_of_any_shape_are_scored_and_failures_are_not(
    tmp_path: Path, name: str, content: str
) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    found, missing = score_predictions(job(tmp_path, ROWS), tmp_path / name, quiet)
    as_json = found.to_json()
    assert (as_json["total"], as_json["scored"], as_json["failed"], missing) == (3, 2, 1, 2)
    assert as_json["metrics"]["Facts"]["f1"] == 87.5
    assert as_json["metrics"]["Facts"]["em"] == 50


RIGHT = "35 to 44 years"
RESPONSE = {
    "object": "response",
    "status": "incomplete",
    "output": [
        {"type": "reasoning", "summary": []},
        {"type": "message", "content": [{"type": "output_text", "text": RIGHT}]},
    ],
}


def line(body: Any, status: int = 200, **more: Any) -> dict[str, Any]:
    """A line of OpenAI's batch format."""
    return {"response": {"status_code": status, "body": body}, **more}


def answer(text: str, index: int) -> dict[str, Any]:
    return {"index": index, "message": {"content": text}}


@pytest.mark.parametrize(
    ("entry", "em"),
    [
        # A blank text is a failure, as it is in a run; a blank prediction is scored, as the benchmark's metrics do.
        ({"text": ""}, None),
        ({"response": " \n\t"}, None),
        ({"text": " ", "prediction": ""}, None),
        ({"text": "[Final Answer]: ", "prediction": ""}, 0),
        ({"Prediction": ""}, 0),
        ({"Prediction": None}, None),
        ({"response": "[ERROR] out of memory"}, None),  # what the benchmark's harness stores
        # Lines of a batch.
        (line({"error": {"message": "No"}}, 500, error=None), None),
        (line(completion("No"), 429), None),
        (line(completion("No"), error={"code": "x"}), None),
        (line({**completion("No"), "error": "died"}), None),
        (line(completion(""), error=None), None),
        (line({"data": [{"embedding": [0.5]}]}), None),
        (line(None), None),
        (line({**RESPONSE, "status": "failed"}), None),
        (line({**RESPONSE, "output": []}), None),
        ({"response": None, "error": {"code": "batch_expired", "message": "No"}}, None),
        (line(completion(RIGHT)), 100),
        (line(RESPONSE), 100),
        (line({"choices": [{"text": RIGHT}]}), 100),
        (line({"choices": [answer("No", index=1), answer(RIGHT, index=0)]}), 100),
    ],
)
def test_an_entry_is_an_answer_or_a_failure(
    tmp_path: Path, entry: dict[str, Any], em: float | None
) -> None:
    is_line = not isinstance(entry.get("response", ""), str)
    name = {"id": "batch_req_0", "custom_id": "q3"} if is_line else {"id": "q3"}
    write_jsonl(tmp_path / "made.jsonl", [{**name, **entry}])
    table, missing = score_predictions(job(tmp_path, ROWS), tmp_path / "made.jsonl", quiet)
    found = table.to_json()
    failed = em is None
    assert (found["total"], found["failed"], found["scored"]) == (1, failed, not failed)
    assert (found["overall"].get("em"), missing) == (em, 4)


def test_a_run_s_own_openai_files_score_as_the_run_did(tmp_path: Path) -> None:
    made = job(tmp_path, ROWS)
    folder = run(made)
    export(folder, Target("openai"))
    f1 = [scores["f1"] for _, scores in scored(folder).values() if scores.get("f1") is not None]
    found, missing = score_predictions(made, folder / "results.openai.jsonl", quiet)
    assert (found.to_json()["total"], found.to_json()["failed"], missing) == (4, 0, 1)
    assert found.to_json()["overall"]["f1"] == pytest.approx(100 * sum(f1) / len(f1))
    found, missing = score_predictions(made, folder / "results.openai.errors.jsonl", quiet)
    assert (found.to_json()["total"], found.to_json()["failed"], missing) == (1, 1, 4)


@pytest.mark.parametrize("format_name", ["csv", "parquet"])
def test_a_reference_column_in_an_export_of_ours_is_not_the_prediction(
    tmp_path: Path, format_name: str
) -> None:
    rows = [{"id": "q1", "say": "1 + 1?", "answer": "right"}]
    base = {"output": {"keep": ["answer"]}}
    folder = run(job(tmp_path, rows, scoring={}, **base))
    export(folder, Target(format_name))
    scoring = {"extract": "text", "scorers": ["em"], "reference": "answer"}
    made = job(tmp_path, rows, scoring=scoring, **base)
    found, _ = score_predictions(made, folder / f"results.{format_name}", quiet)
    assert found.to_json()["overall"]["em"] == 0, "the answer of the dry run, not the reference"


def test_predictions_from_the_command_line(tmp_path: Path) -> None:
    made = tomlkit.dumps(table(tmp_path, ROWS))
    (tmp_path / "job.toml").write_text(made, encoding="utf-8")
    write_jsonl(
        tmp_path / "made.jsonl",
        [
            {"id": "q2", "status": "failed"},
            {"id": "q2", "text": "No"},
            {"id": "?", "text": "x"},
        ],
    )
    args = ("score", "--predictions", tmp_path / "made.jsonl")
    done = batchkit(*args, "--job", tmp_path / "job.toml", "--json")
    found = done.json
    assert (found["total"], found["overall"]["em"], found["missing"]) == (1, 100, 4)
    assert "1 predictions have no row in the input, for example id '?'" in done.stderr
    assert not (tmp_path / "output").exists()
    assert "needs the rows" in batchkit(*args).refused()
    done = batchkit("score", tmp_path / "job.toml", *args[1:])
    assert "\n4 rows of the input have no prediction\n" in done.stdout


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"id": "q1", "text": "x"}\n{"id": "q2"', "a.jsonl line 2: not valid JSON"),
        ("a.jsonl", '{"text": "x"}', "a.jsonl row 0: has no row id; it needs one of id"),
        (
            "a.jsonl",
            '{"id": "q1", "answr": 1}',
            "row 0: has neither a prediction nor a text, only id",
        ),
        ("a.jsonl", '\n["q1"]\n{}', "a.jsonl line 2: expected a JSON object, found ['q1']"),
        ("a.json", '{\n  "results": [\n    {"id": 1},\n', "a.json: not JSON: "),
        ("a.jsonl", '{"id": "q1", "text": ' + "[" * 100_000, "a.jsonl line 1: nested more than"),
        ("a.json", '{"results": ' + "[" * 100_000, "a.json: not JSON: nested"),
        ("a.json", "[3]", "a.json entry 0 (counted from 0): found '3'"),
        ("a.json", "[]", "a.json: has no predictions"),
        (
            "a.jsonl",
            '{"id": "77", "text": "x"}',
            "(the first ids are '77' here and 'q1' in the input)",
        ),
        (None, "", "none.jsonl: no such file"),
    ],
)
def test_predictions_that_can_t_be_used_name_the_place(
    tmp_path: Path, name: str | None, content: str, message: str
) -> None:
    path = tmp_path / (name or "none.jsonl")
    if name:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(JobError) as refused:
        score_predictions(job(tmp_path, ROWS), path, quiet)
    assert message in str(refused.value)


def test_predictions_in_a_pipe_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "made.jsonl")
    with pytest.raises(JobError, match=r"made\.jsonl: can't be read: it is a named pipe"):
        score_predictions(job(tmp_path, ROWS), tmp_path / "made.jsonl", quiet)


def test_an_id_that_names_two_rows_takes_no_prediction(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "made.jsonl", [{"id": "q1", "text": "x"}])
    with pytest.raises(JobError, match="rows 0 and 5 have the same id 'q1'"):
        score_predictions(job(tmp_path, [*ROWS, ROWS[0]]), tmp_path / "made.jsonl", quiet)


# Another run's predictions as references


def test_the_answers_of_another_run_are_the_references_by_id(tmp_path: Path) -> None:
    first = run(job(tmp_path, counted(4), name="first", scoring={"extract": "number"}))
    turned = [*counted(4)[::-1], {"id": "new", "say": "?", "a": "", "kind": "k"}]
    scoring = {"extract": "number", "reference_run": str(first), "scorers": ["em"]}
    folder = run(job(tmp_path, turned, name="second", scoring=scoring))
    assert {name: scores["em"] for name, (_, scores) in scored(folder).items()} == {
        "q3": 0.0,  # row 0 here, row 3 there
        "q2": 0.0,
        "q1": 0.0,
        "q0": 0.0,
        "new": None,
    }
    made = tmp_path / "made.jsonl"
    write_jsonl(made, [{"id": f"q{n}", "prediction": str(n)} for n in range(4)])
    table, missing = score_predictions(job_of_run(folder), made, quiet)
    assert (table.to_json()["overall"]["em"], missing) == (100, 1)


def test_what_the_other_run_answered_later_counts_too(tmp_path: Path) -> None:
    first = job(tmp_path, counted(4), name="first", scoring={"extract": "number"})
    run(make_job(first.model_dump() | {"input": {**first.input.model_dump(), "limit": 2}}, "t"))
    scoring = {"extract": "number", "reference_run": str(first.folder), "scorers": ["em"]}
    second = job(tmp_path, counted(4), name="second", scoring=scoring)
    said: list[str] = []
    run_job(second, say=said.append).checked()
    assert "|   2 | 100.00 |        2 |" in said[-1]
    run(first)
    run_job(second, say=said.append).checked()
    assert "|   4 | 100.00 |        0 |" in said[-1]


@pytest.mark.parametrize("problem", ["missing", "unread", "twice", "twice, one failed"])
def test_a_reference_run_that_can_t_serve_is_refused_before_anything_happens(
    tmp_path: Path, problem: str
) -> None:
    if problem == "unread":
        run(job(tmp_path, counted(2), name="first", scoring={}))
    elif problem.startswith("twice"):
        twice = [*counted(1), *counted(1)]
        if problem.endswith("failed"):
            del twice[1]["say"]
        run(job(tmp_path, twice, name="first", scoring={"extract": "number"}))
    reference = str(tmp_path / "output/first")
    scoring = {"extract": "number", "reference_run": reference, "scorers": ["em"]}
    messages = {"missing": "no run in this folder", "unread": "no prediction"}
    message = messages.get(problem, "names two of its")
    with pytest.raises(JobError, match=f"scoring.reference_run: .*{message}"):
        run(job(tmp_path, counted(2), scoring=scoring))
    assert not (tmp_path / "output/scored").exists()


def test_an_answer_of_the_reference_run_is_that_of_no_other_row_with_its_id(tmp_path: Path) -> None:
    """The other run had a limit, so its id names one row there, and two here."""
    first = job(tmp_path, counted(1), name="first", scoring={"extract": "number"})
    run(first)
    twins = [*counted(1), *({**row, "say": "another"} for row in counted(1))]
    scoring = {"extract": "number", "reference_run": str(first.folder), "scorers": ["em"]}
    second = job(tmp_path, twins, name="second", scoring=scoring)
    with pytest.raises(JobError, match="reference_run: id 'q0' names several rows of this run"):
        run(second)
    assert not second.folder.exists()
    plain = run(job(tmp_path, twins, name="third", scoring={"extract": "number"}))
    with pytest.raises(JobError, match="reference_run: id 'q0' names several rows of this run"):
        score_run(plain, second, say=quiet)
