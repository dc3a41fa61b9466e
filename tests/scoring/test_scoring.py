"""Predictions and scores: what is read from an answer, and what it is worth."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchkit.config.seams import EXTRACTORS
from batchkit.config.tables import ScoringTable
from batchkit.scoring import Scored, Scoring
from batchkit.scoring.extract import extracted
from batchkit.scoring.metrics import tabulate
from batchkit.scoring.overlap import OVERLAPS, overlap, pair
from batchkit.scoring.scorers import score_by
from batchkit.scoring.values import numbers_in, parse_reward, vote_of
from tests.support.realhit import vectors


@pytest.mark.parametrize("vector", vectors("reward_score_parse"))
def test_rewards_are_read_as_the_official_code_reads_them(vector: dict[str, Any]) -> None:
    assert parse_reward(vector["response"], 5.0) == vector["score"]


def test_the_mean_is_over_rows_and_not_over_words() -> None:
    rows = [("1955, 62170", "1955, 62170"), ("Yes", "No"), ("35 to 39 years", "35 to 44 years")]
    scorers = ["f1", "em", "rouge-l", "sacrebleu"]
    scoring = Scoring(ScoringTable(mode="official", reference="answer", scorers=scorers))
    scores = [scoring.score(text, {"answer": right}, "1").scores for text, right in rows]
    table = tabulate(({"status": "ok", "scores": its} for its in scores), None)
    overall = table.to_json()["overall"]
    assert [round(overall[name], 4) for name in scorers] == [58.3333, 33.3333, 58.3333, 11.7867]


@given(st.text(max_size=60), st.text(max_size=60), st.sampled_from(["official", "fixed"]))
def test_any_two_texts_have_scores_from_0_to_1(one: str, other: str, mode: str) -> None:
    for name in OVERLAPS:
        assert 0 <= overlap(name, pair(one, other, mode), mode) <= 1 + 1e-9


@pytest.mark.parametrize(
    ("extract", "options", "text", "found"),
    [
        ("text", {}, "  a b \n", "a b"),
        ("number", {}, "first 3, then 1,234.50 apples", "1234.5"),
        ("number", {}, "1955,62170", "62170"),
        ("number", {}, "none", None),
        ("number", {}, "parcel -9,400,111,899,223,100,001", "-9400111899223100001"),
        ("number", {}, "1e15 and 2.50", "2.5"),
        ("regex", {"pattern": r"answer is (\w+)"}, "answer is A. No: answer is B", "B"),
        ("regex", {"pattern": r"\d+"}, "a 12", "12"),
        ("regex", {"pattern": r"\d+"}, "a", None),
        ("json", {"key": "a.b"}, 'so: {"a": {"b": "x"}} done', "x"),
        ("json", {"key": "a.1"}, '{"a": [1, 2]}', "2"),
        ("json", {}, 'bad { then {"a": 1}', '{"a":1}'),
        ("json", {"key": "c"}, '{"a": 1}', None),
        ("json", {"key": "a"}, "{" * 5000, None),
        ("code", {}, "so\n```python\nx = 1\n```\nand\n```\ny = 2\n```", "y = 2"),
        ("code", {}, "Here:\nimport os\nprint(1)", "import os\nprint(1)"),
        ("code", {}, "no program", None),
        ("reward", {}, "Score: 8.5", "8.5"),
        ("reward", {}, "12 / 10", "10"),
        ("reward", {}, "no number", None),
        ("reward", {"default": 5.0}, "no number", "5"),
    ],
)
def test_extractors(extract: str, options: dict[str, Any], text: str, found: str | None) -> None:
    assert extracted(text, ScoringTable(extract={extract: options})) == found


@given(st.text(max_size=200), st.sampled_from(sorted(EXTRACTORS.built_in)))
def test_no_text_breaks_an_extractor(text: str, extract: str) -> None:
    options = {"pattern": r"(\w+)?x"} if extract == "regex" else {}
    extracted(text, ScoringTable(extract={extract: options}))


def test_numbers() -> None:
    assert numbers_in("−3.5, $1,200 and 7% of 2e3") == [-3.5, 1200, 7, 2000]
    assert numbers_in("v1.2.3 is no number, x2 neither") == []
    assert numbers_in("12,62170 and 1,1955") == [12, 62170, 1, 1955]
    assert numbers_in("- 42 things, 3 - 5, -7") == [42, 3, 5, -7]
    assert numbers_in("of 3 it is .5, -.25 or $.75; no.9 is none") == [3, 0.5, -0.25, 0.75]
    assert vote_of("9400111899223100001", ()) != vote_of("9400111899223100002", ())
    assert numeric("about 101", "100", 0.01) == 1
    assert numeric("102", "100", 0.01) == 0
    assert numeric("1, 2", "1, 2, 3", 0.01) == 0
    assert numeric("none", "100", 0.01) == 0
    assert numeric("100", "none", 0.01) is None


def numeric(prediction: str, reference: str, tolerance: float) -> float | None:
    table = ScoringTable(scorers=[{"numeric": {"tolerance": tolerance}}])
    return score_by("numeric", prediction, reference, table)


def choice(prediction: str, reference: str, choices: list[str]) -> float | None:
    table = ScoringTable(scorers=["choice"], choices=choices)
    return score_by("choice", prediction, reference, table)


def test_choices() -> None:
    words = ["Yes", "No"]
    assert choice(" yes. ", "Yes", words) == 1
    assert choice("The answer is no", "No", words) == 1
    assert choice("yes or no", "No", words) == 0
    assert choice("nothing of it", "No", words) == 0
    assert choice("yes", "Perhaps", words) is None
    assert choice("I see a dog", "A", list("ABCD")) == 0
    assert choice("The answer is B, as a cat shows", "B", list("ABCD")) == 1
    assert choice("b", "B", list("ABCD")) == 1


def test_what_cannot_be_judged_is_unscored_and_no_zero() -> None:
    scoring = Scoring(ScoringTable(extract="number", reference="a", scorers=["em", "numeric"]))
    assert scoring.score("5", {"a": ""}, "1").scores == {"em": None, "numeric": None}
    assert scoring.score("5", {}, "1").scores == {"em": None, "numeric": None}
    found = scoring.score("no number", {"a": "5"}, "1")
    assert found == Scored(None, {"em": None, "numeric": None})


def test_a_reference_run_that_answered_nothing_leaves_its_row_unscored() -> None:
    scoring = Scoring(ScoringTable(scorers=["em"]), {"1": " ", "2": "x"})
    assert scoring.score("x", {}, "1").scores == {"em": None}
    assert scoring.score("x", {}, "2").scores == {"em": 1.0}
    assert scoring.score("x", {}, "3").scores == {"em": None}


def test_the_first_rule_that_fits_a_row_is_its_rule() -> None:
    rules = [
        {"where": {"kind": ["sum", "mean"]}, "scorers": ["numeric"], "reference": "b"},
        {"where": {"kind": "sum"}, "scorers": ["f1"]},
    ]
    table = {"reference": "a", "scorers": ["em"], "rules": rules}
    scoring = Scoring(ScoringTable.model_validate(table))
    row = {"a": "x", "b": "2"}
    assert scoring.score("2", {**row, "kind": "sum"}, "1").scores == {"numeric": 1.0}
    assert scoring.score("x", {**row, "kind": "other"}, "1").scores == {"em": 1.0}
    assert scoring.score("x", row, "1").scores == {"em": 1.0}
    assert scoring.fields == {"a", "b", "kind"}


@pytest.mark.parametrize("found", [True, "true", "TRUE"])
def test_a_rule_finds_what_the_filter_of_the_input_finds(found: Any) -> None:
    rule = {"where": {"is_number": True}, "scorers": ["numeric"]}
    table = {"reference": "a", "scorers": ["em"], "rules": [rule]}
    scoring = Scoring(ScoringTable.model_validate(table))
    assert scoring.score("1.0", {"a": "1", "is_number": found}, "1").scores == {"numeric": 1.0}


def test_charts_wait() -> None:
    scoring = Scoring(ScoringTable(reference="a", scorers=["em", "chart"]))
    scored = scoring.score("x", {"a": "x"}, "1").scores
    assert scored == {"em": 1.0, "ecr": None, "pass": None}


@pytest.mark.parametrize(
    ("text", "score"), [("2, then 7.5", 0.75), ("none", None), ("-3", 0.0), ("12", 1.0)]
)
def test_a_judge_s_number_is_divided_by_the_highest_score(text: str, score: float | None) -> None:
    scoring = Scoring(ScoringTable(extract="number", scorers=[{"judge": {"max_score": 10}}]))
    assert scoring.score(text, {}, "1").scores == {"judge": score}


def rewards(**values: list[float | None]) -> list[dict[str, Any]]:
    return [
        {"status": "ok", "fields": {"category": name}, "scores": {"reward": value}}
        for name, scores in values.items()
        for value in scores
    ]


def test_rewards_by_category() -> None:
    failed: dict[str, Any] = {"status": "failed", "fields": {}}
    table = tabulate([*rewards(physical=[2, 4, 9], social=[8, 8, None]), failed], "category")
    found = table.to_json()
    assert (found["total"], found["scored"], found["unscored"], found["failed"]) == (7, 5, 1, 1)
    assert (found["best"], found["worst"]) == ("social", "physical")
    spread = found["metrics"]["physical"]["spread"]["reward"]
    assert spread.pop("std") == pytest.approx(math.sqrt(26 / 3))
    assert spread == {"mean": 5, "median": 4, "min": 2, "max": 9, "count": 3}
    assert found["overall"]["reward"] == pytest.approx(6.2)
    text = table.to_text()
    assert "| physical | 5.00 | 2.94 |   4.00 | 2.00 | 9.00 |     3 |" in text
    assert text.endswith("best: social\nworst: physical")


def test_the_table_is_markdown_whatever_a_group_is_called() -> None:
    records = [{"status": "ok", "fields": {"k": "a|b\nc"}, "scores": {"em": 1.0}}]
    lines = tabulate(records, "k").to_text().split("\n")
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
    assert "a\\|b c" in lines[2]


def test_an_empty_table() -> None:
    assert tabulate([], "k").to_json()["total"] == 0
    assert tabulate([], None).to_text()
