"""The extractor and the comparison of RealHiTBench, held against the output of its own code."""

from __future__ import annotations

from typing import Any

import pytest

from batchkit.config.seams import MODES
from batchkit.config.tables import ScoringTable
from batchkit.scoring import Scored, Scoring
from batchkit.scoring.extract import extracted
from batchkit.scoring.overlap import overlap, pair
from tests.support.realhit import vectors

NAMES = {"F1": "f1", "EM": "em", "ROUGE-L": "rouge-l", "SacreBLEU": "sacrebleu"}


def percent(name: str, prediction: str, reference: str, mode: str = "official") -> float:
    return overlap(name, pair(prediction, reference, mode), mode) * 100


@pytest.mark.parametrize("vector", vectors("qa", "real_rows"))
def test_scores_equal_the_official_ones_to_the_digit(vector: dict[str, Any]) -> None:
    texts = pair(vector["prediction"], vector["reference"], "official")
    if "norm_prediction" in vector:
        assert texts == (vector["norm_prediction"], vector["norm_reference"])
    for called, name in NAMES.items():
        found = percent(name, vector["prediction"], vector["reference"])
        assert found == pytest.approx(vector["metrics"][called], abs=1e-9)


@pytest.mark.parametrize(
    ("text", "official", "fixed"),
    [
        ("1.5", "15", "1.5"),
        ("-3.2", "32", "-3.2"),
        ("−3.2", "−32", "-3.2"),
        ("1955,62170", "195562170", "1955 62170"),
        ("62,170", "62170", "62170"),
        ("1,234,567.89 USD", "12345679 usd", "1234567.9 usd"),
        ("The cat, a dog", "cat dog", "cat dog"),
        ("yes.", "yes", "yes"),
        ("2019-2020", "20192020", "2019 2020"),
        ("1.5e3", "15e3", "1500"),
        ("Employer’s", "employer’s", "employers"),
        ("and/or", "andor", "and or"),
        ("", "", ""),
    ],
)  # fmt: skip
def test_normalisation(text: str, official: str, fixed: str) -> None:
    assert MODES.load("official").normalise(text) == official
    assert MODES.load("fixed").normalise(text) == fixed


@pytest.mark.parametrize(
    ("name", "prediction", "reference", "official", "fixed"),
    [
        ("em", "1.5", "15", 100, 0),
        ("em", "-3.2", "3.2", 100, 0),
        ("f1", "1955,62170", "1955, 62170", 0, 100),
        ("sacrebleu", "England", "England", 0, 100),
        ("rouge-l", "英国", "英国", 0, 100),
        ("f1", "", "Yes", 0, 0),
        ("em", "", "", 0, 0),
    ],
)
def test_what_fixed_corrects(
    name: str, prediction: str, reference: str, official: float, fixed: float
) -> None:
    assert percent(name, prediction, reference) == pytest.approx(official)
    assert percent(name, prediction, reference, "fixed") == pytest.approx(fixed)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[Final Answer]: 1955, 62170", "1955, 62170"),
        ("Step 1…\n[Final Answer]: 5\nThat is it.", "5\nThat is it."),
        ("[Final Answer]: 1 and then [Final Answer]: 2", "2"),
        ("Final Answer: 3", "3"),
        ("Final Answer: 9 … [Final Answer]: 3", "3"),
        ("**[Final Answer]:** 12", "** 12"),
        ("[final answer]: 3", None),
        ("nothing", None),
    ],
)
def test_the_final_answer(text: str, found: str | None) -> None:
    table = ScoringTable(extract="final-answer")
    assert extracted(text, table, may_default=False) == found


def test_without_a_marker_the_whole_text_is_the_prediction() -> None:
    scoring = Scoring(ScoringTable(extract="final-answer", reference="a", scorers=["em"]))
    assert scoring.finds_nothing("  y ", {"a": "y"})
    assert scoring.score("  y ", {"a": "y"}, "1") == Scored("y", {"em": 1.0})
