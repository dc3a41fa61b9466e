"""``batchkit score``: answers that exist become predictions, scores, and one table."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from batchkit.commands.retry import retry_failed
from batchkit.commands.run import run_job
from batchkit.commands.score import score_run
from batchkit.commands.score.predictions import score_predictions
from batchkit.config.loading import load_job
from batchkit.config.tables import JobConfig, ScoringTable
from batchkit.errors import InputError, JobError, StoreError
from batchkit.execution.processor import ProductionBatchProcessor
from batchkit.runs.scores import is_mixed, table_of
from batchkit.storage.job_toml import job_of_run
from batchkit.storage.log import RESULTS
from batchkit.storage.newest_lines import read_newest
from batchkit.storage.score_store import SCORES, read_scored
from tests.support import command_line
from tests.support.chat_server import Refused, error, serving
from tests.support.own_process import batchkit
from tests.support.rows import write_jsonl
from tests.support.scored_runs import (
    NUMBER,
    ROWS,
    SCORING,
    counted,
    echo,
    engine,
    job,
    quiet,
    run,
    scored,
    table,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def answered(tmp_path: Path) -> Path:
    """The run folder of ROWS, whose engine is gone."""
    with serving(echo) as server:
        return run(job(tmp_path, ROWS, engine=engine(server)))


# At the end of a run


def test_a_confusion_table_counts_choices_by_the_right_answer(tmp_path: Path) -> None:
    rows = [
        {"id": "1", "say": "yes", "a": "Yes"},
        {"id": "2", "say": "It is no.", "a": "Yes"},
        {"id": "3", "say": "perhaps", "a": "no"},
        {"id": "4", "a": "no"},
    ]
    choices = {"reference": "a", "scorers": ["choice"], "choices": ["yes", "no"]}
    with serving(echo) as server:
        made = job(tmp_path, rows, engine=engine(server), scoring=choices, output={"keep": ["a"]})
        folder = run(made)
    found = table_of(folder)
    assert found.to_json()["confusion"] == {"yes": {"yes": 1, "no": 1}, "no": {"(other)": 1}}
    assert found.to_text().splitlines()[-2:] == [
        "| no                        |       1 |   0 |   0 |",
        "| yes                       |       0 |   1 |   1 |",
    ]


def test_a_run_scores_its_answers_and_ends_with_the_table(tmp_path: Path) -> None:
    with serving(echo) as server:
        made = table(tmp_path, ROWS, engine=engine(server))
        (tmp_path / "job.toml").write_text(tomlkit.dumps(made), encoding="utf-8")
        done = command_line.batchkit("run", tmp_path / "job.toml")
    assert (done.exit_code, done.json["ok"]) == (3, 4)
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
    done = command_line.batchkit("score", tmp_path / "output/scored", "--json").ok()
    assert done.stderr == ""
    found = done.json
    facts, structure = found["metrics"]["Facts"], found["metrics"]["Structure"]
    assert (found["total"], found["scored"], found["unscored"], found["failed"]) == (5, 3, 1, 1)
    assert facts["f1"] == pytest.approx(175 / 3)
    assert facts["em"] == found["overall"]["em"] == pytest.approx(100 / 3)
    assert (facts["n"], facts["failed"], structure["n"], structure["unscored"]) == (3, 1, 0, 1)


def test_a_job_that_scores_nothing_says_nothing_of_scores(tmp_path: Path) -> None:
    said: list[str] = []
    run_job(job(tmp_path, counted(2), scoring={}), say=said.append).checked()
    folder = tmp_path / "output/scored"
    (first, _) = read_newest(folder / RESULTS)
    assert said == []
    assert first.keys().isdisjoint(("prediction", "scores"))
    refused = command_line.batchkit("score", folder).refused()
    assert "set [scoring] extract, reference and scorers" in refused


def test_a_blank_first_one_of_several_answers_is_unscored_and_the_others_are_kept(
    tmp_path: Path,
) -> None:
    texts = [[" ", "42"], ["42", "42"], ["42", ""], ["", "\n"]]

    def before(text: str, body: dict[str, Any]) -> None:
        said = enumerate(texts[int(text)])
        choices = [{"index": n, "message": {"content": one}} for n, one in said]
        raise Refused(200, {"choices": choices})

    rows = [{"id": f"q{n}", "say": str(n), "a": "42", "kind": "k"} for n in range(4)]
    for extract in ("text", "final-answer"):
        scoring = {**SCORING, "extract": extract}
        with serving(before) as server:
            made = {"sampling": {"n": 2}, "retry": {"attempts": 1}, "scoring": scoring}
            folder = run(job(tmp_path, rows, name=extract, engine=engine(server), **made))
        for _ in range(2):  # by the run, and again by the command
            records = {r["id"]: r for r in read_scored(folder)}
            assert [records[f"q{n}"]["status"] for n in range(4)] == ["ok"] * 3 + ["failed"]
            assert records["q0"]["scores"] == {"f1": None, "em": None}
            assert records["q0"]["unscored"] == "the answer has no text"
            assert [choice["text"] for choice in records["q0"]["choices"]] == [" ", "42"]
            assert [records[f"q{n}"]["scores"]["em"] for n in (1, 2)] == [1, 1]
            assert score_run(folder, say=quiet).to_json()["unscored"] == 1


def test_an_extractor_that_breaks_costs_its_score_and_no_answer(tmp_path: Path) -> None:
    """The extractor comes from another package, because none of ours is known to break."""
    code = "def last(text):\n    return {'0': '0', '2': '2'}[text.split()[-1].strip('.')]\n"
    (tmp_path / "other.py").write_text(code)
    (tmp_path / "other-1.0.dist-info").mkdir()
    points = "[batchkit.extractors]\nlast = other:last\n"
    (tmp_path / "other-1.0.dist-info/entry_points.txt").write_text(points)
    made = table(tmp_path, counted(3), scoring={**NUMBER, "extract": "last"})
    (tmp_path / "job.toml").write_text(tomlkit.dumps(made), encoding="utf-8")
    done = batchkit("run", "job.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "output/scored"
    assert scored(folder)["q1"] == (None, {"em": None})
    assert scored(folder)["q2"] == ("2", {"em": 1.0})
    assert "the extractor last fails: KeyError" in (folder / "run.log").read_text()


HOSTILE = [
    ("json", '{"x": 123456789012345678901234567890}'),
    ("json", '{"x": ' + "9" * 5000 + "}"),
    ("json", '{"x": "\\ud800"}'),
    ("json", '{"x": ' + "[" * 400 + "]" * 400 + "}"),
    ("json", "[" * 100_000),
    ("code", "```" + " " * 100_000),
    ("number", "7" * 100_000),
    ("reward", "7" * 100_000 + "x"),
    ("final-answer", "[Final Answer]: \0 \u2028"),
    ("final-answer", "word " * 200_000 + "[Final Answer]: 7"),
    ("text", "0" * 5000 + "a1" * 5000),
]


@pytest.mark.parametrize("mode", ["official", "fixed"])
def test_hostile_answers_are_scored_like_others_and_at_once(tmp_path: Path, mode: str) -> None:
    rows = [
        {"id": str(n), "say": str(n), "kind": extract, "a": "7"}
        for n, (extract, _) in enumerate(HOSTILE)
    ]
    kinds = sorted({extract for extract, _ in HOSTILE})
    rules = [{"where": {"kind": kind}, "extract": kind} for kind in kinds]
    scoring = {"reference": "a", "scorers": ["f1", "em", "rouge-l"], "rules": rules, "mode": mode}
    began = time.monotonic()
    with serving(lambda text, body: echo(HOSTILE[int(text)][1], body)) as server:
        folder = run(job(tmp_path, rows, engine=engine(server), scoring=scoring))
    before = scored(folder)
    assert score_run(folder, say=quiet).total == len(HOSTILE)
    assert scored(folder) == before
    assert before["9"] == ("7", {"f1": 1.0, "em": 1.0, "rouge-l": 1.0})
    assert time.monotonic() - began < 60  # minutes, before


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
    changed = job_of.scoring.model_copy(update={"extract": {"text": {}}, "scorers": {"em": {}}})
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

    first = stopping(3, em)
    ProductionBatchProcessor(first, quiet=True).process()
    assert not is_mixed(first.folder)
    ProductionBatchProcessor(stopping(6, f1), quiet=True).process()
    assert is_mixed(first.folder)
    folder = run(stopping(9, em))
    assert not is_mixed(folder)
    assert {tuple(scores) for _, scores in scored(folder).values()} == {("em",)}


@pytest.mark.parametrize("is_file", [True, False], ids=["job file", "--set"])
def test_another_scoring_is_kept_by_the_run_and_secrets_stay_masked(
    tmp_path: Path, is_file: bool
) -> None:
    tables: dict[str, Any] = {"scoring": NUMBER, "vars": {"api_key": "sk-secret"}}
    folder = run(job(tmp_path, counted(3), **tables))
    tables |= {
        "scoring": {**NUMBER, "scorers": ["numeric"]},
        "engine": {"kind": "vllm", "model": "m"},
    }
    made = tomlkit.dumps(table(tmp_path, counted(3), **tables))
    (tmp_path / "job.toml").write_text(made, encoding="utf-8")
    setting = ("--set", 'scoring.scorers=["numeric"]')
    args = (tmp_path / "job.toml",) if is_file else (folder, *setting)
    found = command_line.batchkit("score", *args, "--json").json
    assert (found["overall"]["numeric"], "em" in found["overall"]) == (100, False)
    assert command_line.batchkit("score", folder, "--json").json == found
    assert "sk-secret" not in (folder / "job.toml").read_text()
    kept = load_job(folder / "job.toml")
    assert kept.engine.kind == "dry-run"  # the run is what it was, but for its scoring
    assert kept.scoring.scorers == {"numeric": {"tolerance": 0.01}}
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
    """All finish within a millisecond or two: the time alone distinguishes no records."""
    rows = counted(20)
    folder = run(job(tmp_path, rows, scoring=NUMBER))
    score_run(folder, say=quiet)
    before = scored(folder)
    made = job(tmp_path, rows[10:] + rows[:10], scoring=NUMBER)
    ProductionBatchProcessor(made, on_change="requeue", quiet=True).process()
    assert scored(folder) == before
    assert is_mixed(folder)
    run(made)
    assert not is_mixed(folder)


def test_requeue_does_not_bring_scores_of_an_earlier_scoring_back(tmp_path: Path) -> None:
    rows = [{**row, "b": "other"} for row in counted(4)]
    folder = run(job(tmp_path, rows, scoring=NUMBER))
    other = {**NUMBER, "reference": "b"}
    score_run(folder, job(tmp_path, rows, scoring=other), say=quiet)
    now = [{"id": "new", "say": "?", "a": "x", "b": "other"}, *rows]
    run_job(job(tmp_path, now, scoring=other), on_change="requeue", say=quiet).checked()
    assert {scores["em"] for _, scores in scored(folder).values()} == {0}
    assert not is_mixed(folder)


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
        (lambda rows: rows[:2], "row 2 (id q2) is no longer in the input"),
        (lambda rows: rows[::-1], "row 0 (id q0) is not the row that was answered"),
        (lambda rows: [{**row, "a": "9"} for row in rows], "row 0 (id q0)"),
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
    assert not is_mixed(folder)


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
    with pytest.raises(
        InputError,
        match=r"rows came from Python, so they can't be read again; the run did not keep the fields .* in output\.keep",
    ):
        score_run(made.folder, made.model_copy(update={"scoring": other}), say=quiet)


def test_a_run_folder_may_be_moved(tmp_path: Path, answered: Path) -> None:
    moved = tmp_path / "elsewhere/renamed"
    moved.parent.mkdir()
    answered.rename(moved)
    (tmp_path / "rows.jsonl").unlink()  # the fields that were kept are enough
    assert score_run(moved, say=quiet).total == 5
    assert not answered.exists()
    assert (moved / SCORES).exists()


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


@pytest.mark.parametrize("key", ["reference", "group_by"])
def test_a_misspelt_field_is_refused_at_once_and_by_score_too(tmp_path: Path, key: str) -> None:
    rows = counted(2, answer="x")
    misspelt = job(tmp_path, rows, scoring={**NUMBER, key: "anwser"})
    path = write_jsonl(tmp_path / "made.jsonl", [{"id": "q1", "prediction": "1"}])
    refused = re.escape("scoring: the rows have no field 'anwser'; did you mean 'answer'?")
    for act in (
        lambda: run_job(misspelt, say=quiet).checked(),
        lambda: score_run(run(job(tmp_path, rows, scoring=NUMBER)), misspelt, say=quiet),
        lambda: score_predictions(misspelt, path, quiet),
    ):
        with pytest.raises(JobError, match=refused):
            act()


def test_scorers_without_anything_to_compare_with_are_reported(tmp_path: Path) -> None:
    rules = [{"where": {"kind": "x"}, "reference": "a"}, {"where": {"kind": "y"}}]
    scoring = {"extract": "number", "scorers": ["em", "reward", "judge"], "rules": rules}
    made = job(tmp_path, counted(2), scoring=scoring)
    folder = run(made)
    hint = "scoring: em needs a right answer to compare with: set scoring.reference"
    assert hint in (folder / "run.log").read_text()
    said: list[str] = []
    score_run(folder, say=said.append)
    assert any(text.startswith(hint) for text in said)
    without_rules = {**scoring, "rules": [], "scorers": ["reward", "judge"]}
    said = []
    score_run(folder, job(tmp_path, counted(2), scoring=without_rules), say=said.append)
    assert said == []


def test_scores_that_were_replaced_by_a_score_that_was_killed_are_known_to_be_mixed(
    tmp_path: Path, answered: Path
) -> None:
    """As if it had been killed between the new scores and the note of how they were made."""
    assert not is_mixed(answered)
    kept = {name: (answered / name).read_bytes() for name in ("job.toml", "starts.jsonl")}
    changed = job_of_run(answered).scoring.model_copy(update={"scorers": {"em": {}}})
    made = job_of_run(answered).model_copy(update={"scoring": changed})

    class Killed(BaseException):
        """Nothing catches it, as nothing does SIGKILL."""

    def dies_after_the_scores(real: Any) -> Any:
        def dies(*given: Any) -> Any:
            if (answered / SCORES).exists():
                raise Killed
            return real(*given)

        return dies

    # The calls that write job.toml and starts.jsonl, which are written after the scores.
    for owner, call in ((Path, "replace"), (os, "ftruncate")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, call, dies_after_the_scores(getattr(owner, call)))
            with pytest.raises(Killed):
                score_run(answered, made, say=quiet)
        assert is_mixed(answered)
        run_job(job_of_run(answered), say=quiet).checked()
        assert not is_mixed(answered)
        (answered / SCORES).unlink()
        for other, content in kept.items():
            (answered / other).write_bytes(content)


def test_a_run_whose_log_is_gone_is_not_scored(answered: Path) -> None:
    score_run(answered, say=quiet)
    scores = (answered / SCORES).read_bytes()
    (answered / RESULTS).unlink()
    for act in (score_run, table_of):
        with pytest.raises(StoreError, match=r"results\.jsonl: is missing"):
            act(answered)
    assert (answered / SCORES).read_bytes() == scores
