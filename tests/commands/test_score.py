"""``batchkit score``: answers that exist become predictions, scores, and one table."""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import tomlkit
from PIL import Image

from batchkit.commands.export import export
from batchkit.commands.run import retry_failed, run_job
from batchkit.commands.score import is_mixed, score_run, table_of
from batchkit.commands.score.predictions import score_predictions
from batchkit.config.loading import load_job, make_job
from batchkit.config.tables import JobConfig, ScoringTable
from batchkit.errors import BatchkitError, InputError, JobError, StoreError
from batchkit.execution.processor import ProductionBatchProcessor
from batchkit.scoring.extract import EXTRACTORS
from batchkit.storage.job_toml import job_of_run
from batchkit.storage.ledger import RESULTS
from batchkit.storage.newest import read_newest
from batchkit.storage.runfolder import claim
from batchkit.storage.score_store import SCORES, read_scored
from tests.support.chat_server import MODEL, ChatServer, Refused, error, serving
from tests.support.own_process import batchkit
from tests.support.paths import ROOT
from tests.support.rows import write_jsonl

# What each row is to be answered, and what it is worth, by hand: the first three F1 1, 0 and 3/4
# and EM 1, 0, 0; the fourth has nothing to compare with, and the fifth no prompt.
ROWS = [
    {"id": "q1", "kind": "Facts", "say": "so [Final Answer]: 1955, 62170", "a": "1955, 62170"},
    {"id": "q2", "kind": "Facts", "say": "Final Answer: Yes", "a": "No"},
    {"id": "q3", "kind": "Facts", "say": "[Final Answer]: 35 to 39 years", "a": "35 to 44 years"},
    {"id": "q4", "kind": "Structure", "say": "no marker", "a": ""},
    {"id": "q5", "kind": "Facts", "a": "x"},
]
SCORING = {
    "extract": "final-answer",
    "reference": "a",
    "scorers": ["f1", "em"],
    "group_by": "kind",
}


def completion(text: str) -> dict[str, Any]:
    choice = {"index": 0, "message": {"content": text}, "finish_reason": "stop"}
    return {"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}


def echo(text: str, body: dict[str, Any]) -> str:
    """The server answers with the prompt, to the letter."""
    raise Refused(200, completion(text))


def table(folder: Path, rows: Iterable[Mapping[str, Any]], **tables: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "name": "scored",
        "input": {"path": str(write_jsonl(folder / "rows.jsonl", rows)), "id": "id"},
        "prompt": {"user": "{{ say }}"},
        "media": {"root": str(folder)},
        "engine": {"kind": "dry-run"},
        "output": {"dir": str(folder / "output"), "keep": ["kind", "a"]},
        "scoring": SCORING,
    }
    for name, value in tables.items():
        is_part = isinstance(value, dict) and name != "scoring"
        made[name] = {**made.get(name, {}), **value} if is_part else value
    return made


def job(folder: Path, rows: Iterable[Mapping[str, Any]], **tables: Any) -> JobConfig:
    return make_job(table(folder, rows, **tables), "test")


def write_job(folder: Path, made: JobConfig) -> None:
    """As ``job.toml``, for the command line."""
    content = tomlkit.dumps(json.loads(made.model_dump_json(exclude_none=True)))
    (folder / "job.toml").write_text(content, encoding="utf-8")


def engine(server: ChatServer) -> dict[str, Any]:
    return {"kind": "openai-server", "model": MODEL, "base_url": server.url}


def quiet(text: str) -> None:
    """Nobody listens."""


def run(made: JobConfig) -> Path:
    return Path(run_job(made, say=quiet).checked().folder)


def counted(count: int, **more: Any) -> list[dict[str, Any]]:
    """Rows for the dry-run engine: with extract = "number", row n is answered n."""
    return [{"id": f"q{n}", "say": "?", "a": str(n), "kind": "k", **more} for n in range(count)]


NUMBER = {"extract": "number", "reference": "a", "scorers": ["em"]}


def scored(folder: Path) -> dict[str, Any]:
    """Prediction and scores by id."""
    return {r["id"]: (r.get("prediction"), r.get("scores")) for r in read_scored(folder)}


@pytest.fixture
def answered(tmp_path: Path) -> Path:
    """The run folder of ROWS, whose engine is gone."""
    with serving(echo) as server:
        return run(job(tmp_path, ROWS, engine=engine(server)))


# At the end of a run


def test_a_run_scores_its_answers_and_ends_with_the_table(tmp_path: Path) -> None:
    with serving(echo) as server:
        made = table(tmp_path, ROWS, engine=engine(server))
        (tmp_path / "job.toml").write_text(tomlkit.dumps(made), encoding="utf-8")
        done = batchkit("run", "job.toml", cwd=tmp_path)
    assert done.returncode == 3
    assert json.loads(done.stdout.splitlines()[-1])["ok"] == 4
    assert [line for line in done.stderr.splitlines() if line.startswith("|")] == [
        "|           |   n |    F1 |    EM | unscored | failed |",
        "| --------- | --: | ----: | ----: | -------: | -----: |",
        "| Facts     |   3 | 58.33 | 33.33 |        0 |      1 |",
        "| Structure |   0 |     – |     – |        1 |      0 |",
        "| all       |   3 | 58.33 | 33.33 |        1 |      1 |",
    ]
    records = {r["id"]: r for r in read_newest(tmp_path / "output/scored" / RESULTS)}
    assert {name: (r["prediction"], r["scores"]) for name, r in records.items()} == {
        "q1": ("1955, 62170", {"f1": 1.0, "em": 1.0}),
        "q2": ("Yes", {"f1": 0.0, "em": 0.0}),
        "q3": ("35 to 39 years", {"f1": 0.75, "em": 0.0}),
        "q4": ("no marker", {"f1": None, "em": None}),
        "q5": (None, {}),
    }
    done = batchkit("score", "output/scored", "--json", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stderr == ""
    found = json.loads(done.stdout)
    facts, structure = found["metrics"]["Facts"], found["metrics"]["Structure"]
    assert (found["total"], found["scored"], found["unscored"], found["failed"]) == (5, 3, 1, 1)
    assert facts["f1"] == pytest.approx(175 / 3)
    assert facts["em"] == found["overall"]["em"] == pytest.approx(100 / 3)
    assert (facts["n"], facts["failed"], structure["n"], structure["unscored"]) == (3, 1, 0, 1)


def test_a_job_that_scores_nothing_says_nothing_of_scores(tmp_path: Path) -> None:
    said: list[str] = []
    run_job(job(tmp_path, counted(2), scoring={}), say=said.append).checked()
    (first, _) = read_newest(tmp_path / "output/scored" / RESULTS)
    assert said == []
    assert "prediction" not in first
    assert "scores" not in first


def test_a_scorer_that_breaks_costs_its_score_and_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the dict that extractors are added to; none of ours is known to break."""
    works = EXTRACTORS["number"]

    def breaks(text: str, table: ScoringTable) -> str | None:
        if "row 1" in text:
            raise ArithmeticError("not this one")
        return works(text, table)

    monkeypatch.setitem(EXTRACTORS, "number", breaks)
    folder = run(job(tmp_path, counted(3), scoring=NUMBER))
    assert scored(folder)["q1"] == (None, {"em": None})
    assert scored(folder)["q2"] == ("2", {"em": 1.0})
    assert "row q1: the extractor number fails: ArithmeticError" in (folder / "run.log").read_text()


@pytest.mark.parametrize(
    ("extract", "text"),
    [
        ("json", '{"x": 123456789012345678901234567890}'),
        ("json", '{"x": ' + "9" * 5000 + "}"),
        ("json", '{"x": "\\ud800"}'),
        ("json", '{"x": ' + "[" * 400 + "]" * 400 + "}"),
        ("json", "[" * 100_000),
        ("code", "```" + " " * 100_000),
        ("number", "7" * 100_000),
        ("reward", "7" * 100_000 + "x"),
        ("final-answer", "[Final Answer]: \0 \u2028"),
        ("text", "0" * 5000 + "a1" * 5000),
    ],
)
def test_hostile_answers_are_scored_like_others_and_at_once(
    tmp_path: Path, extract: str, text: str
) -> None:
    scoring = {"extract": extract, "reference": "a", "scorers": ["f1", "em", "rouge-l"]}
    for mode in ("official", "fixed"):
        began = time.monotonic()
        rows = [{"id": "1", "say": text, "kind": "k", "a": "7"}]
        with serving(echo) as server:
            made = job(tmp_path, rows, engine=engine(server), scoring={**scoring, "mode": mode})
            folder = run(made)
        ((_, before),) = scored(folder).values()
        assert score_run(folder, say=quiet).total == 1
        ((_, after),) = scored(folder).values()
        assert before == after
        assert time.monotonic() - began < 20  # minutes, before
        shutil.rmtree(folder)


def test_a_long_answer_is_scored_whole(tmp_path: Path) -> None:
    text = "word " * 200_000 + "[Final Answer]: 7"
    rows = [{"id": "1", "say": "x", "a": "7", "kind": "k"}]
    with serving(lambda asked, body: echo(text, body)) as server:
        folder = run(job(tmp_path, rows, engine=engine(server), scoring=SCORING))
    assert scored(folder) == {"1": ("7", {"f1": 1.0, "em": 1.0})}


def test_references_that_are_no_text_are_compared_as_json(tmp_path: Path) -> None:
    rows = [
        {"id": "1", "say": "62170", "a": 62170},
        {"id": "2", "say": "1.5", "a": 1.5},
        {"id": "3", "say": "true", "a": True},
        {"id": "4", "say": "[3,4]", "a": [3, 4]},
        {"id": "5", "say": "x", "a": None},
        {"id": "6", "say": "12345678901234567890", "a": 12345678901234567890},
    ]
    scoring = {"reference": "a", "scorers": ["em"]}
    for keep in (["a"], []):
        with serving(echo) as server:
            made = job(
                tmp_path, rows, engine=engine(server), scoring=scoring, output={"keep": keep}
            )
            folder = run(made)
        expected = {name: {"em": 1.0} for name in "12346"} | {"5": {"em": None}}
        assert {name: scores for name, (_, scores) in scored(folder).items()} == expected
        score_run(folder, say=quiet)
        assert {name: scores for name, (_, scores) in scored(folder).items()} == expected
        shutil.rmtree(folder)


# Another scoring


def test_a_run_whose_scoring_changed_is_scored_anew_as_a_whole(answered: Path) -> None:
    job_of = job_of_run(answered)
    changed = job_of.scoring.model_copy(update={"extract": "text", "scorers": ["em"]})
    said: list[str] = []
    run_job(job_of.model_copy(update={"scoring": changed}), say=said.append).checked()
    assert {tuple(scores) for _, scores in scored(answered).values()} == {("em",), ()}
    assert scored(answered)["q2"] == ("Final Answer: Yes", {"em": 0.0})
    assert "EM" in said[-1]
    assert "F1" not in said[-1]
    assert job_of_run(answered).scoring == changed


def test_scorings_are_never_mixed_however_often_they_change_on_the_way(tmp_path: Path) -> None:
    """Three starts of a run: one scores with em, the next with f1, the last with em again."""
    em, f1 = NUMBER, {**NUMBER, "scorers": ["f1"]}

    def stopping(limit: int, scoring: dict[str, Any]) -> JobConfig:
        return job(tmp_path, counted(9), input={"limit": limit}, scoring=scoring)

    ProductionBatchProcessor(stopping(3, em), quiet=True).process()
    ProductionBatchProcessor(stopping(6, f1), quiet=True).process()
    folder = run(stopping(9, em))
    assert {tuple(scores) for _, scores in scored(folder).values()} == {("em",)}


def test_score_with_a_job_file_takes_its_scoring_and_the_run_keeps_it(
    tmp_path: Path, answered: Path
) -> None:
    made = table(tmp_path, ROWS, engine={"kind": "dry-run"}, scoring={**SCORING, "scorers": ["em"]})
    made["vars"] = {"api_key": "sk-secret"}
    (tmp_path / "job.toml").write_text(tomlkit.dumps(made), encoding="utf-8")
    found = json.loads(batchkit("score", "job.toml", "--json", cwd=tmp_path).stdout)
    assert "f1" not in found["overall"]
    again = json.loads(batchkit("score", answered, "--json", cwd=tmp_path).stdout)
    assert again == found
    kept = load_job(answered / "job.toml")
    assert kept.engine.kind == "openai-server"  # the run is what it was, but for its scoring
    assert kept.scoring.scorers == ["em"]


def test_score_by_set_is_remembered_and_secrets_stay_masked(tmp_path: Path) -> None:
    made = job(tmp_path, counted(3), scoring=NUMBER, vars={"api_key": "sk-secret"})
    folder = run(made)
    done = batchkit("score", folder, "--set", 'scoring.scorers=["numeric"]', "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["overall"]["numeric"] == 100
    assert "sk-secret" not in (folder / "job.toml").read_text()
    assert load_job(folder / "job.toml").scoring.scorers == ["numeric"]
    assert scored(folder)["q2"] == ("2", {"numeric": 1.0})


@pytest.mark.parametrize("override", ['scoring.scorers=["em"]', 'scoring={extract="text"}'])
def test_retry_failed_does_not_score_in_another_way(
    tmp_path: Path, answered: Path, override: str
) -> None:
    with pytest.raises(JobError, match="batchkit score"):
        retry_failed(answered, overrides=[override], say=quiet)


def test_a_row_that_is_run_again_has_its_new_scores(tmp_path: Path) -> None:
    rows = [*ROWS[:2], {"id": "q9", "kind": "Facts", "say": "{% raise %}", "a": "7"}]
    is_up = False

    def before(text: str, body: dict[str, Any]) -> str:
        if "raise" in text and not is_up:
            raise Refused(400, error("not now"))
        return echo("[Final Answer]: 7" if "raise" in text else text, body)

    with serving(before) as server:
        folder = run(job(tmp_path, rows, engine=engine(server)))
        score_run(folder, say=quiet)
        assert scored(folder)["q9"] == (None, {})
        is_up = True
        retry_failed(folder, say=quiet)
    assert scored(folder)["q9"] == ("7", {"f1": 1.0, "em": 1.0})
    assert score_run(folder, say=quiet).to_json()["overall"]["em"] == pytest.approx(200 / 3)


def test_rows_that_changed_places_keep_their_own_scores(tmp_path: Path) -> None:
    """All finish within a millisecond or two: the time alone tells no record from another."""
    rows = counted(20)
    folder = run(job(tmp_path, rows, scoring=NUMBER))
    score_run(folder, say=quiet)
    before = scored(folder)
    made = job(tmp_path, rows[10:] + rows[:10], scoring=NUMBER)
    ProductionBatchProcessor(made, on_change="requeue", quiet=True).process()
    assert scored(folder) == before


# Where the rows come from


def without_fields(folder: Path, rows: list[dict[str, Any]], **tables: Any) -> Path:
    """A run that kept no field."""
    return run(job(folder, rows, output={"keep": []}, scoring={}, **tables))


def by_kind(folder: Path) -> JobConfig:
    """The run's job, scored by fields that it did not keep, as nothing was scored then."""
    scoring = ScoringTable.model_validate({**NUMBER, "group_by": "kind"})
    return job_of_run(folder).model_copy(update={"scoring": scoring})


def test_fields_that_were_not_kept_are_read_from_the_input_again(tmp_path: Path) -> None:
    rows = [{**row, "kind": "ab"[n % 2]} for n, row in enumerate(counted(6))]
    folder = without_fields(tmp_path, rows, input={"where": {"kind": "b"}, "limit": 2})
    found = score_run(folder, by_kind(folder), say=quiet).to_json()
    assert (found["total"], found["overall"]["em"], list(found["metrics"])) == (2, 100, ["b"])
    assert list(scored(folder)) == ["q1", "q3"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: None, "rows.jsonl"),
        (lambda rows: rows[:2], "row 2 (id q2) is no longer there"),
        (lambda rows: rows[::-1], "row 0 (id q0) is not the one that was answered"),
        (lambda rows: [{**row, "a": "9"} for row in rows], "row 0 (id q0) is not the one"),
    ],
    ids=["gone", "shorter", "reordered", "changed"],
)
def test_an_input_that_is_no_longer_the_one_that_was_answered_is_refused(
    tmp_path: Path, change: Any, message: str
) -> None:
    folder = without_fields(tmp_path, counted(3))
    before = scored(folder)
    rows = change(counted(3))
    if rows is None:
        (tmp_path / "rows.jsonl").unlink()
    else:
        write_jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(InputError) as refused:
        score_run(folder, by_kind(folder), say=quiet)
    assert message in str(refused.value)
    assert scored(folder) == before


def test_fields_that_were_kept_need_no_input(tmp_path: Path, answered: Path) -> None:
    (tmp_path / "rows.jsonl").unlink()
    assert score_run(answered, say=quiet).total == 5


def test_a_failed_row_that_was_mended_since_does_not_stop_the_scoring(tmp_path: Path) -> None:
    rows = counted(3)
    del rows[1]["say"]
    folder = without_fields(tmp_path, rows)
    write_jsonl(tmp_path / "rows.jsonl", counted(3))
    found = score_run(folder, by_kind(folder), say=quiet).to_json()
    assert (found["scored"], found["failed"], found["metrics"]["(none)"]["failed"]) == (2, 1, 1)


def test_rows_from_python_are_scored_by_what_was_kept(tmp_path: Path) -> None:
    made = job(tmp_path, [], scoring=NUMBER)
    made = made.model_copy(update={"input": made.input.model_copy(update={"path": None})})
    ProductionBatchProcessor(made, quiet=True).process(counted(3))
    assert score_run(made.folder, say=quiet).to_json()["overall"]["em"] == 100
    other = made.scoring.model_copy(update={"reference": "say"})
    with pytest.raises(InputError, match="rows came from Python; name them in output"):
        score_run(made.folder, made.model_copy(update={"scoring": other}), say=quiet)


def test_a_run_folder_may_be_moved(tmp_path: Path, answered: Path) -> None:
    moved = tmp_path / "elsewhere/renamed"
    moved.parent.mkdir()
    answered.rename(moved)
    assert score_run(moved, say=quiet).total == 5
    assert not answered.exists()
    assert (moved / SCORES).exists()


def test_a_run_that_another_process_holds_is_not_scored(answered: Path) -> None:
    with claim(answered), pytest.raises(StoreError, match="is working in this run folder"):
        score_run(answered, say=quiet)


def test_a_run_without_a_row_has_an_empty_table(tmp_path: Path) -> None:
    folder = run(job(tmp_path, counted(2), input={"where": {"kind": "none of them"}}))
    found = score_run(folder, say=quiet).to_json()
    assert (found["total"], found["metrics"], found["overall"]["n"]) == (0, {}, 0)


def test_a_run_without_scoring_says_what_to_set(tmp_path: Path) -> None:
    folder = run(job(tmp_path, counted(1), scoring={}))
    done = batchkit("score", folder, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "set [scoring] extract, reference and scorers" in done.stderr


@pytest.mark.parametrize(
    "damage",
    [
        b"{",
        b"7\n",
        b"{}\n",
        b'{"index":0}\n',
        b"\xff\n",
        b'{"index":"0","input_hash":"","finished_at":"","prediction":null,"scores":{}}\n',
        b'{"index":0,"input_hash":"","finished_at":"","prediction":null,"scores":3}\n',
    ],
)
def test_damaged_scores_are_named_and_written_anew(answered: Path, damage: bytes) -> None:
    score_run(answered, say=quiet)
    before = scored(answered)
    with (answered / SCORES).open("ab") as file:
        file.write(damage)
    lines = (answered / SCORES).read_bytes().splitlines(keepends=True)
    (answered / SCORES).write_bytes(b"".join([lines[-1], *lines[:-1]]))
    with pytest.raises(StoreError, match=r"scores\.jsonl line 1: damaged.*`batchkit score`"):
        list(read_scored(answered))
    score_run(answered, say=quiet)
    assert scored(answered) == before


def test_scores_count_only_for_the_record_that_they_were_made_from(answered: Path) -> None:
    """As if a row had been run again after the scoring."""
    score_run(answered, say=quiet)
    records = [json.loads(line) for line in (answered / RESULTS).read_text().splitlines()]
    newer = next(r for r in records if r["id"] == "q2")
    newer |= {"finished_at": "2099-01-01T00:00:00.000Z", "scores": {"f1": 0.5}, "prediction": "new"}
    with (answered / RESULTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(newer, separators=(",", ":")) + "\n")
    assert scored(answered)["q2"] == ("new", {"f1": 0.5})
    assert scored(answered)["q1"] == ("1955, 62170", {"f1": 1.0, "em": 1.0})


def test_a_misspelt_reference_is_said_at_once(tmp_path: Path) -> None:
    folder = run(job(tmp_path, counted(2, answer="x"), scoring={**NUMBER, "reference": "anwser"}))
    said = (folder / "run.log").read_text()
    assert "scoring: the first row has no field 'anwser'; did you mean 'answer'?" in said


@pytest.mark.parametrize("key", ["reference", "group_by"])
def test_a_misspelt_field_is_said_by_score_too(tmp_path: Path, key: str) -> None:
    folder = run(job(tmp_path, counted(2, answer="x"), scoring=NUMBER))
    changed = job_of_run(folder).scoring.model_copy(update={key: "anwser"})
    made = job_of_run(folder).model_copy(update={"scoring": changed})
    hint = "scoring: the first row has no field 'anwser'; did you mean 'answer'?"
    for _ in range(2):
        said: list[str] = []
        score_run(folder, made, say=said.append)
        assert said == [hint]
    path = write_jsonl(tmp_path / "made.jsonl", [{"id": "q1", "prediction": "1"}])
    said = []
    score_predictions(made, path, said.append)
    assert said == [hint]


def test_a_misspelt_field_is_said_by_a_run_that_has_nothing_left_but_to_score(
    tmp_path: Path,
) -> None:
    run(job(tmp_path, counted(2, answer="x"), scoring=NUMBER))
    said: list[str] = []
    misspelt = {**NUMBER, "reference": "anwser"}
    run_job(job(tmp_path, counted(2, answer="x"), scoring=misspelt), say=said.append).checked()
    assert said[0] == "scoring: the first row has no field 'anwser'; did you mean 'answer'?"


def test_scorers_without_anything_to_compare_with_are_told(tmp_path: Path) -> None:
    rules = [{"where": {"kind": "x"}, "reference": "a"}, {"where": {"kind": "y"}}]
    scoring = {"extract": "number", "scorers": ["em", "reward", "judge"], "rules": rules}
    made = job(tmp_path, counted(2), scoring=scoring)
    folder = run(made)
    hint = "scoring: em needs a right answer to compare with: set scoring.reference"
    assert hint in (folder / "run.log").read_text()
    said: list[str] = []
    score_run(folder, say=said.append)
    assert any(text.startswith(hint) for text in said)
    told = {**scoring, "rules": [], "scorers": ["reward", "judge"]}
    said = []
    score_run(folder, job(tmp_path, counted(2), scoring=told), say=said.append)
    assert said == ["2 answers are not judged: [scoring.judge] names no model"]


def test_scores_that_were_replaced_by_a_score_that_was_killed_are_known_to_be_mixed(
    tmp_path: Path, answered: Path
) -> None:
    """As if it had been killed between the new scores and the note of how they were made."""
    assert not is_mixed(answered)
    kept = {name: (answered / name).read_bytes() for name in ("job.toml", "manifest.json")}
    changed = job_of_run(answered).scoring.model_copy(update={"scorers": ["em"]})
    made = job_of_run(answered).model_copy(update={"scoring": changed})

    class Killed(BaseException):
        """Nothing catches it, as nothing does SIGKILL."""

    real = os.replace
    for name in kept:  # each of the files that are written after the scores

        def dies(source: Any, target: Any, name: str = name) -> None:
            if Path(target).name == name and (answered / SCORES).exists():
                raise Killed
            real(source, target)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "replace", dies)
            with pytest.raises(Killed):
                score_run(answered, made, say=quiet)
        assert is_mixed(answered)
        run_job(job_of_run(answered), say=quiet).checked()
        assert not is_mixed(answered)
        (answered / SCORES).unlink()
        for other, content in kept.items():
            (answered / other).write_bytes(content)


def test_a_scoring_that_fails_leaves_nothing_mixed(tmp_path: Path) -> None:
    folder = without_fields(tmp_path, counted(3))
    write_jsonl(tmp_path / "rows.jsonl", counted(3)[::-1])
    with pytest.raises(InputError):
        score_run(folder, by_kind(folder), say=quiet)
    assert not is_mixed(folder)


def test_a_run_that_was_stopped_after_its_scoring_changed_is_mixed(tmp_path: Path) -> None:
    first = job(tmp_path, counted(9), input={"limit": 3}, scoring=NUMBER)
    ProductionBatchProcessor(first, quiet=True).process()
    assert not is_mixed(first.folder)
    f1 = {**NUMBER, "scorers": ["f1"]}
    ProductionBatchProcessor(job(tmp_path, counted(9), scoring=f1), quiet=True).process()
    assert is_mixed(first.folder)
    score_run(first.folder, say=quiet)
    assert not is_mixed(first.folder)


def test_a_run_whose_log_is_gone_is_not_scored(answered: Path) -> None:
    score_run(answered, say=quiet)
    scores = (answered / SCORES).read_bytes()
    (answered / RESULTS).unlink()
    for act in (score_run, table_of):
        with pytest.raises(StoreError, match=r"results\.jsonl: is missing"):
            act(answered)
    assert (answered / SCORES).read_bytes() == scores


def test_three_thousand_rows(tmp_path: Path) -> None:
    rows = [{"id": n, "say": "?", "a": str(n - n % 3), "kind": "abc"[n % 3]} for n in range(3000)]
    folder = run(job(tmp_path, rows, scoring={**NUMBER, "group_by": "kind"}))
    found = score_run(folder, say=quiet).to_json()
    assert [found["metrics"][kind]["em"] for kind in "abc"] == [100, 0, 0]
    assert found["overall"]["em"] == pytest.approx(100 / 3)


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
    told = found.to_json()
    assert (told["total"], told["scored"], told["failed"], missing) == (3, 2, 1, 2)
    assert told["metrics"]["Facts"]["f1"] == 87.5
    assert told["metrics"]["Facts"]["em"] == 50


def test_predictions_from_the_command_line(tmp_path: Path) -> None:
    made = tomlkit.dumps(table(tmp_path, ROWS))
    (tmp_path / "job.toml").write_text(made, encoding="utf-8")
    write_jsonl(
        tmp_path / "made.jsonl",
        [{"id": "q2", "text": "x"}, {"id": "q2", "text": "No"}, {"id": "?", "text": "x"}],
    )
    args = ("score", "--predictions", "made.jsonl")
    done = batchkit(*args, "--job", "job.toml", "--json", cwd=tmp_path)
    found = json.loads(done.stdout)
    assert (found["total"], found["overall"]["em"], found["missing"]) == (1, 100, 4)
    assert "1 predictions have no row in the input, as id '?'" in done.stderr
    assert not (tmp_path / "output").exists()
    done = batchkit(*args, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "needs the job" in done.stderr
    done = batchkit("score", "job.toml", *args[1:], cwd=tmp_path)
    assert "\n4 rows of the input have no prediction\n" in done.stdout


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"id": "q1", "text": "x"}\n{"id": "q2"', "a.jsonl line 2: not JSON"),
        ("a.jsonl", '{"text": "x"}', "a.jsonl line 1: no id; one of id"),
        (
            "a.jsonl",
            '{"id": "q1", "answr": 1}',
            "line 1: neither a prediction nor a text; it has id",
        ),
        ("a.jsonl", '\n["q1"]\n{}', "a.jsonl line 2: found \"['q1']\""),
        ("a.json", '{\n  "results": [\n    {"id": 1},\n', "a.json: not JSON: "),
        ("a.jsonl", '{"id": "q1", "text": ' + "[" * 100_000, "a.jsonl line 1: not JSON: nested"),
        ("a.json", "[3]", "a.json entry 0: found '3'"),
        ("a.json", "[]", "a.json: holds no prediction"),
        ("a.jsonl", '{"id": "77", "text": "x"}', "(first there: '77', here: 'q1'); set input.id"),
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


def test_an_id_that_names_two_rows_takes_no_prediction(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "made.jsonl", [{"id": "q1", "text": "x"}])
    with pytest.raises(JobError, match="id 'q1' names rows 0 and 5"):
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


@pytest.mark.parametrize("problem", ["missing", "unread", "twice"])
def test_a_reference_run_that_can_t_serve_is_refused_before_anything_happens(
    tmp_path: Path, problem: str
) -> None:
    if problem == "unread":
        run(job(tmp_path, counted(2), name="first", scoring={}))
    elif problem == "twice":
        twice = [*counted(1), *counted(1)]
        run(job(tmp_path, twice, name="first", scoring={"extract": "number"}))
    reference = str(tmp_path / "output/first")
    scoring = {"extract": "number", "reference_run": reference, "scorers": ["em"]}
    messages = {"missing": "no run there", "unread": "no prediction", "twice": "names two of its"}
    with pytest.raises(JobError, match=f"scoring.reference_run: .*{messages[problem]}"):
        run(job(tmp_path, counted(2), scoring=scoring))
    assert not (tmp_path / "output/scored").exists()


# A judge


NO_MODEL = {"kind": "openai-server", "model": "typo"}


class Judge:
    """Answers questions with what they say, and judges by ``verdicts``, one after another."""

    def __init__(self, verdicts: Mapping[str, list[str | Exception]]) -> None:
        self.verdicts = verdicts
        self.asked: Counter[str] = Counter()
        self.prompts: list[str] = []

    def __call__(self, text: str, body: dict[str, Any]) -> str:
        if not text.startswith("JUDGE "):
            return echo(text, body)
        name = text.split()[1]
        self.prompts.append(text)
        self.asked[name] += 1
        verdicts = self.verdicts.get(name, ["[Score]: 50/100"])
        verdict = verdicts[min(self.asked[name], len(verdicts)) - 1]
        if isinstance(verdict, Exception):
            raise verdict
        return echo(verdict, body)


def judged_job(folder: Path, server: ChatServer, rows: Any = None, **tables: Any) -> JobConfig:
    judge = {
        "engine": engine(server),
        "prompt": {"user": "JUDGE {{ id }} {{ prediction }} / {{ reference }}"},
        **tables.pop("judge", {}),
    }
    scoring = {**NUMBER, "scorers": ["em", "judge"], "judge": judge, **tables.pop("scoring", {})}
    rows = counted(3) if rows is None else rows
    return job(folder, rows, scoring=scoring, **tables)


def test_a_judge_s_score_is_read_clamped_and_asked_for_again(tmp_path: Path) -> None:
    judge = Judge(
        {
            "q0": ["[Score]: 80/100"],
            "q1": ["Score: 7"],
            "q2": ["I'd say [Score]: 90 / 100."],
            "q3": ["**[Score]:** 250/100"],
            "q4": ["hard to tell", "[Score]: 12.5"],
            "q5": ["no idea"],
            "q6": ["**Score**: 85"],
            "q7": ["**[Score]**: 86/100"],
            "q8": ["Score: -5"],
            "q9": ["Score: .5"],
            "q10": ["[Score]: 3\nno, rather\n**[Score]: 4**"],
            "q11": ["Score: \u22125", "[Score]: 5"],
        }
    )
    with serving(judge) as server:
        folder = run(judged_job(tmp_path, server, counted(12)))
    assert {name: scores["judge"] for name, (_, scores) in scored(folder).items()} == {
        "q0": 0.8,
        "q1": 0.07,
        "q2": 0.9,
        "q3": 1.0,
        "q4": 0.125,
        "q5": None,
        "q6": 0.85,
        "q7": 0.86,
        "q8": 0.0,
        "q9": 0.005,
        "q10": 0.04,
        "q11": 0.05,
    }
    again = {"q4": 2, "q5": 3, "q11": 2}
    assert judge.asked == {f"q{n}": again.get(f"q{n}", 1) for n in range(12)}
    assert any(prompt.startswith("JUDGE q0 0 / 0") for prompt in judge.prompts)
    found = score_run(folder, say=quiet).to_json()["overall"]
    scores = [80, 7, 90, 100, 12.5, 85, 86, 0, 0.5, 4, 5]
    assert found["judge"] == pytest.approx(sum(scores) / 11)
    assert found["unscored_by"] == {"judge": 1}


def test_a_judgement_is_paid_for_once(tmp_path: Path) -> None:
    judge = Judge({})
    keep = {"keep": ["id", "a"]}
    with serving(judge) as server:
        made = judged_job(tmp_path, server, output=keep)
        folder = run(made)
        before = scored(folder)
        assert judge.asked.total() == 3
        score_run(folder, say=quiet)
        run(made)
        more = {"scorers": ["em", "f1", "judge"], "group_by": "kind"}
        made = judged_job(tmp_path, server, scoring=more, output=keep)
        run(made)  # it needs more of the row than was kept; the judge does not
        assert judge.asked.total() == 3
        number = {"extract": "regex", "pattern": r"row (\d)"}
        score_run(folder, judged_job(tmp_path, server, scoring=number, output=keep), say=quiet)
        assert judge.asked.total() == 3  # the same predictions, read in another way
        assert {n: s["judge"] for n, (_, s) in scored(folder).items()} == {
            n: s["judge"] for n, (_, s) in before.items()
        }
        other = {"extract": "regex", "pattern": r"row ([01])"}
        score_run(folder, judged_job(tmp_path, server, scoring=other, output=keep), say=quiet)
    assert judge.asked == {"q0": 1, "q1": 1, "q2": 2}


def test_a_judge_that_is_away_costs_nothing_and_is_asked_later(tmp_path: Path) -> None:
    with serving(Judge({})) as server:
        port = server.port
        made = judged_job(tmp_path, server)
    write_job(tmp_path, made)
    done = batchkit("run", "job.toml", cwd=tmp_path)
    assert done.returncode == 1
    assert f"127.0.0.1:{port}/v1: no answer" in done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["ok"], summary["exit"]) == (3, 1)
    folder = tmp_path / "output/scored"
    assert scored(folder)["q2"] == ("2", {"em": 1.0, "judge": None})
    judge = Judge({})
    with serving(judge, port=port):
        done = batchkit("run", "job.toml", cwd=tmp_path)
    assert done.returncode == 0
    assert scored(folder)["q2"] == ("2", {"judge": 0.5, "em": 1.0})
    assert judge.asked.total() == 3


def test_a_judgement_that_failed_is_tried_again_by_the_next_score(tmp_path: Path) -> None:
    judge = Judge({"q1": [Refused(400, error("not now")), "[Score]: 60"]})
    with serving(judge) as server:
        folder = run(judged_job(tmp_path, server))
        assert scored(folder)["q1"][1]["judge"] is None
        score_run(folder, say=quiet)
        score_run(folder, say=quiet)
    assert {name: scores["judge"] for name, (_, scores) in scored(folder).items()} == {
        "q0": 0.5,
        "q1": 0.6,
        "q2": 0.5,
    }
    assert judge.asked == {"q0": 1, "q1": 2, "q2": 1}


def test_judgements_outlive_whatever_is_tried_in_between(tmp_path: Path) -> None:
    """Another model, another prompt, another reference; and back."""
    judge, said = Judge({}), list[str]()
    with serving(judge) as server:
        made = judged_job(tmp_path, server, counted(3, b="7"))
        folder = run(made)
        before = scored(folder)
        away = judged_job(
            tmp_path,
            server,
            counted(3, b="7"),
            judge={"engine": NO_MODEL | {"base_url": server.url}},
        )
        with pytest.raises(BatchkitError, match="typo"):
            score_run(folder, away, say=quiet)
        misspelt = {"prompt": {"user": "JUDGE {{ id }} {{ predicton }}"}}
        other = judged_job(tmp_path, server, counted(3, b="7"), judge=misspelt)
        score_run(folder, other, say=said.append)
        assert judge.asked.total() == 3
        score_run(folder, made, say=quiet)
        assert judge.asked.total() == 3
        assert scored(folder) == before
        reference = made.scoring.model_copy(update={"reference": "b"})
        score_run(folder, made.model_copy(update={"scoring": reference}), say=quiet)
        assert judge.asked.total() == 6  # it is shown another reference: that is another question
        score_run(folder, made, say=quiet)
        score_run(folder, made.model_copy(update={"scoring": reference}), say=quiet)
    assert judge.asked.total() == 6
    assert any(
        t.startswith("3 of 3 judgements failed, the first with template: ") and "'predicton'" in t
        for t in said
    )


def test_rows_that_come_and_go_keep_their_judgements(tmp_path: Path) -> None:
    judge = Judge({})

    def requeue(rows: list[dict[str, Any]]) -> None:
        made = judged_job(tmp_path, server, rows, engine={"kind": "dry-run"}, scoring=text)
        run_job(made, on_change="requeue", say=quiet).checked()

    text = {"extract": "regex", "pattern": "^."}  # dry-run's answers name their rows' indexes
    with serving(judge) as server:
        folder = run(judged_job(tmp_path, server, counted(4), scoring=text))
        requeue([{"id": "new", "say": "?", "a": "x", "kind": "k"}, *counted(4)])
        assert judge.asked == {"q0": 1, "q1": 1, "q2": 1, "q3": 1, "new": 1}
        requeue(counted(2))
        requeue(counted(4)[::-1])
        assert judge.asked.total() == 5
    assert {scores["judge"] for _, scores in scored(folder).values()} == {0.5}


def test_answers_that_show_a_judge_the_same_are_judged_once(tmp_path: Path) -> None:
    judge = Judge({})
    prompt = {"user": "JUDGE all {{ reference }}"}
    with serving(judge) as server:
        rows = [{**row, "a": "same"} for row in counted(5)]
        folder = run(judged_job(tmp_path, server, rows, judge={"prompt": prompt}))
    assert judge.asked == {"all": 1}
    assert [scores["judge"] for _, scores in scored(folder).values()] == [0.5] * 5


def test_a_secret_that_the_judge_does_not_read_is_no_part_of_it(tmp_path: Path) -> None:
    """It is masked in the run's job.toml, from which `score` goes on."""
    judge = Judge({})
    with serving(judge) as server:
        folder = run(judged_job(tmp_path, server, vars={"api_key": "sk-secret"}))
        score_run(folder, say=quiet)
    assert judge.asked.total() == 3


@pytest.mark.parametrize(("command", "signum"), [("score", signal.SIGINT), ("run", signal.SIGTERM)])
def test_judging_may_be_interrupted_and_goes_on(tmp_path: Path, command: str, signum: int) -> None:
    judge = Judge({})

    def slowly(text: str, body: dict[str, Any]) -> str:
        time.sleep(0.1)
        return judge(text, body)

    with serving(slowly) as server:
        slow = {**engine(server), "options": {"max_num_seqs": 2}}
        made = judged_job(tmp_path, server, counted(60), judge={"engine": slow})
        if command == "score":
            plain = made.scoring.model_copy(update={"scorers": ["em"]})
            run(made.model_copy(update={"scoring": plain}))
        write_job(tmp_path, made)
        process = subprocess.Popen(
            [sys.executable, "-m", "batchkit", command, "job.toml"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + 20
        while judge.asked.total() < 10 and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signum)
        stdout, stderr = process.communicate(timeout=20)
        assert process.returncode == 128 + signum, stderr
        assert "run the same command to go on" in stderr
        if command == "run":
            summary = json.loads(stdout.splitlines()[-1])
            assert (summary["ok"], summary["exit"]) == (60, 128 + signum)
        assert {scores["em"] for _, scores in scored(made.folder).values()} == {1.0}
        assert {scores.get("judge") for _, scores in scored(made.folder).values()} == {None}
        server.before = judge
        assert batchkit(command, "job.toml", cwd=tmp_path).returncode == 0
    assert {scores["judge"] for _, scores in scored(made.folder).values()} == {0.5}
    assert 60 <= judge.asked.total() <= 64  # what was in flight as it stopped


def test_judging_that_was_killed_pays_again_only_for_what_was_in_flight(tmp_path: Path) -> None:
    judge = Judge({})

    def slowly(text: str, body: dict[str, Any]) -> str:
        time.sleep(0.05)
        return judge(text, body)

    with serving(slowly) as server:
        slow = {**engine(server), "options": {"max_num_seqs": 2}}
        made = judged_job(tmp_path, server, counted(40), judge={"engine": slow})
        write_job(tmp_path, made)
        for goal in (8, 16):
            process = subprocess.Popen(
                [sys.executable, "-m", "batchkit", "run", "job.toml"],
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            deadline = time.monotonic() + 20
            while judge.asked.total() < goal and time.monotonic() < deadline:
                time.sleep(0.01)
            process.kill()
            process.wait()
        server.before = judge
        run(made)
    assert {scores["judge"] for _, scores in scored(made.folder).values()} == {0.5}
    assert 40 <= judge.asked.total() <= 40 + 2 * 3  # two in flight, and one being written


def test_only_the_rows_of_a_rule_are_judged_with_their_texts_and_images(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("TABLE 1", encoding="utf-8")
    Image.new("RGB", (40, 40), "red").save(tmp_path / "q1.png")
    kinds_and_rows = zip("aba", counted(3, params={"max_tokens": 9}), strict=True)
    rows = [{**row, "kind": kind} for kind, row in kinds_and_rows]
    judge = Judge({})
    with serving(judge) as server:
        made = judged_job(
            tmp_path,
            server,
            rows,
            scoring={"scorers": ["em"], "rules": [{"where": {"kind": "b"}, "scorers": ["judge"]}]},
            judge={
                "prompt": {
                    "user": "JUDGE {{ id }} {{ table }}",
                    "texts": {"table": "t.txt"},
                    "images": ["{{ id }}.png"],
                },
                "sampling": {"sampling_column": "params"},
            },
            output={"keep": ["id", "a", "kind"]},
        )
        folder = run(made)
        kinds = [part["type"] for part in server.bodies[-1]["messages"][0]["content"]]
        score_run(folder, say=quiet)
    assert judge.prompts == ["JUDGE q1 TABLE 1"]
    assert kinds == ["image_url", "text"]
    assert server.bodies[-1]["max_tokens"] == 9
    assert {name: scores for name, (_, scores) in scored(folder).items()} == {
        "q0": {"em": 1.0},
        "q1": {"judge": 0.5},
        "q2": {"em": 1.0},
    }


def test_without_a_judge_its_rows_are_unscored_and_that_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    scoring = {**NUMBER, "scorers": ["em", "judge"]}
    run_job(job(tmp_path, counted(2), scoring=scoring), say=said.append).checked()
    assert "2 answers are not judged: [scoring.judge] names no model" in said
    assert "| 100.00 |" in said[-1]


def test_charts_are_run_only_where_that_is_allowed_and_one_that_can_t_be_spares_the_others(
    tmp_path: Path,
) -> None:
    program = "import matplotlib.pyplot as plt\nplt.bar(['a', 'b'], [3, 4])\nplt.show()"
    row = {"id": "q0", "say": program, "a": "[3, 4]", "SubQType": "BarChart Generation"}
    rows = [row, {**row, "id": "q1", "SubQType": None}]
    del rows[1]["SubQType"]
    scoring = {"extract": "code", "reference": "a", "scorers": ["chart"], "mode": "fixed"}
    said: list[str] = []
    with serving(echo) as server:
        made = job(tmp_path, rows, engine=engine(server), scoring=scoring)
        run_job(made, say=said.append).checked()
    none = {"ecr": None, "pass": None}
    assert {name: scores for name, (_, scores) in scored(made.folder).items()} == {
        "q0": none,
        "q1": none,
    }
    assert "2 charts are unscored: scoring.allow_code = true runs their code" in said
    allowed = made.scoring.model_copy(update={"allow_code": True})
    score_run(made.folder, made.model_copy(update={"scoring": allowed}), say=said.append)
    assert {name: scores for name, (_, scores) in scored(made.folder).items()} == {
        "q0": {"ecr": 1.0, "pass": 1.0},
        "q1": none,
    }
    assert any(t.startswith("row q1: its chart is unscored: 'SubQType' is undef") for t in said)


def test_predictions_from_elsewhere_are_judged_too(tmp_path: Path) -> None:
    judge = Judge({"q1": ["[Score]: 30"]})
    write_jsonl(tmp_path / "made.jsonl", [{"id": "q1", "prediction": "1"}])
    with serving(judge) as server:
        made = judged_job(tmp_path, server)
        found, _ = score_predictions(made, tmp_path / "made.jsonl", quiet)
    assert found.to_json()["overall"] == {
        "n": 1,
        "em": 100,
        "judge": 30,
        "unscored": 0,
        "failed": 0,
    }
    assert not (tmp_path / "output").exists()


def test_judgements_of_predictions_from_elsewhere_are_kept_beside_them(tmp_path: Path) -> None:
    judge = Judge({})
    made_elsewhere = [{"id": f"q{n}", "prediction": str(n)} for n in range(3)]
    path = write_jsonl(tmp_path / "made.jsonl", made_elsewhere)

    def dies_after_two(text: str, body: dict[str, Any]) -> str:
        if judge.asked.total() == 2:
            raise Refused(401, error("Incorrect API key provided"))
        return judge(text, body)

    with serving(dies_after_two) as server:
        one = {**engine(server), "options": {"max_num_seqs": 1}}
        made = judged_job(tmp_path, server, judge={"engine": one})
        with pytest.raises(BatchkitError):
            score_predictions(made, path, quiet)
        server.before = judge
        for _ in range(2):
            found, _ = score_predictions(made, path, quiet)
            assert found.to_json()["overall"]["judge"] == 50
    assert judge.asked == {"q0": 1, "q1": 1, "q2": 1}
    assert (tmp_path / "made.jsonl.judge").is_dir()


# Exports


def test_exports_hold_the_newest_scores(tmp_path: Path, answered: Path) -> None:
    changed = job_of_run(answered).scoring.model_copy(update={"scorers": ["em"]})
    score_run(answered, job_of_run(answered).model_copy(update={"scoring": changed}), say=quiet)
    em = [1.0, 0.0, 0.0, None, None]
    for name in ("parquet", "jsonl", "csv"):
        export(answered, name, tmp_path / f"out.{name}")
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["scores.em"] for row in rows] == em
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line)["scores"].get("em") for line in lines] == em
    with (tmp_path / "out.csv").open(newline="") as file:
        assert [row["scores.em"] for row in csv.DictReader(file)] == ["1.0", "0.0", "0.0", "", ""]
    assert rows[1]["prediction"] == "Yes"
    assert "scores.f1" not in rows[1]


REALHIT = [
    {
        "id": n,
        "FileName": "t",
        "QuestionType": "Fact Checking" if n < 3 else "Data Analysis",
        "SubQType": "s",
        "Question": "?",
        "FinalAnswer": answer,
        "ProcessedAnswer": "",
        **({} if said is None else {"say": said}),
    }
    for n, (answer, said) in enumerate(
        [
            ("1955, 62170", "1955, 62170"),
            ("35 to 44 years", "35 to 39 years"),
            ("x", None),
            ("a b c", "b"),
        ]
    )
]
REALHIT_SCORING = {
    "extract": "text",
    "reference": "FinalAnswer",
    "scorers": ["f1", "em", "rouge-l", "sacrebleu"],
    "group_by": "QuestionType",
}


@pytest.fixture
def realhit(tmp_path: Path) -> Path:
    with serving(echo) as server:
        made = job(
            tmp_path,
            REALHIT,
            engine=engine(server),
            scoring=REALHIT_SCORING,
            output={"keep": []},
            vars={"modality": "text"},
        )
        return run(made)


def test_the_harness_s_file_tells_what_the_table_tells(tmp_path: Path, realhit: Path) -> None:
    done = batchkit("export", realhit, "--realhit", "out", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "out").glob("results_*.json")
    content = json.loads(path.read_text())
    found = score_run(realhit, say=quiet).to_json()["metrics"]
    for kind, metrics in content["aggregate_metrics"].items():
        ours = found[kind]
        assert metrics == pytest.approx(
            {
                "F1": ours["f1"],
                "EM": ours["em"],
                "ROUGE-L": ours["rouge-l"],
                "SacreBLEU": ours["sacrebleu"],
            }
        )
    assert content["aggregate_metrics"]["Fact Checking"]["F1"] == 87.5
    assert [result["id"] for result in content["results"]] == [0, 1, 3]
    assert content["results"][1]["Metrics"]["EM"] == 0
    assert content["results"][1] | {"Metrics": 0, "ProcessingTime": 0} == {
        "id": 1,
        "FileName": "t",
        "QuestionType": "Fact Checking",
        "SubQType": "s",
        "Question": "?",
        "Reference": "35 to 44 years",
        "Prediction": "35 to 39 years",
        "Metrics": 0,
        "ProcessingTime": 0,
    }
    assert content["config"]["total_queries"] == 3
    assert content["config"]["modality"] == "text"
    assert content["config"]["throughput"] > 0
    checkpoint = json.loads((tmp_path / "out/checkpoint.json").read_text())
    assert checkpoint["processed_ids"] == [0, 1, 3]
    table, missing = score_predictions(job_of_run(realhit), path, quiet)  # and back again
    assert table.to_json()["metrics"]["Fact Checking"]["f1"] == 87.5
    assert missing == 1


def test_the_harness_s_file_goes_where_it_is_asked_to(tmp_path: Path, realhit: Path) -> None:
    (results, checkpoint) = export(realhit, "realhit", tmp_path / "x/mine.json")
    assert (results.path, checkpoint.path) == (
        tmp_path / "x/mine.json",
        tmp_path / "x/checkpoint.json",
    )
    assert (results.rows, checkpoint.rows) == (3, 3)
    (results, _) = export(realhit, "realhit")
    assert results.path.parent == realhit / "realhit"


@pytest.mark.parametrize("name", ["", "mine.json"])
def test_the_harness_s_checkpoint_never_takes_the_place_of_ours(realhit: Path, name: str) -> None:
    before = (realhit / "checkpoint.json").read_bytes()
    with pytest.raises(StoreError, match=r"checkpoint\.json: is a run's own"):
        export(realhit, "realhit", realhit / name)
    assert (realhit / "checkpoint.json").read_bytes() == before


def test_throughput_counts_the_time_of_a_start_that_was_killed(realhit: Path) -> None:
    """It could not note its time: it lasted at least up to its last row."""
    manifest = json.loads((realhit / "manifest.json").read_text())
    (start,) = manifest["starts"]
    killed = start | {"started_at": "2000-01-01T00:00:00.000Z", "seconds": None, "ended_at": None}
    again = start | {"started_at": "2099-01-01T00:00:00.000Z", "seconds": 1.5}
    manifest["starts"] = [killed, again]
    (realhit / "manifest.json").write_text(json.dumps(manifest))
    (results, _) = export(realhit, "realhit")
    config = json.loads(results.path.read_text())["config"]
    assert config["duration_seconds"] > 20 * 365 * 86400
    assert config["throughput"] == pytest.approx(3 / config["duration_seconds"])


def test_a_run_whose_input_is_gone_has_no_harness_file(tmp_path: Path, realhit: Path) -> None:
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(InputError):
        export(realhit, "realhit", tmp_path / "out")
