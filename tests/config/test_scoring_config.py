"""The keys ``extract`` and ``scorers`` of a job file, with their parameters."""

from __future__ import annotations

from typing import Any

import pytest

from batchkit.config.loading import make_job
from batchkit.config.tables import JobConfig
from batchkit.errors import JobError


def job(scoring: dict[str, Any], *overrides: str) -> JobConfig:
    return make_job({"engine": {"kind": "dry-run"}, "scoring": scoring}, "test", overrides)


PLACEHOLDER = "expected a name, or a table { NAME = { PARAMETER = VALUE } }"
MISTAKES: list[tuple[dict[str, Any], str]] = [
    (
        {"extract": {"regex": {"pattern": "("}}},
        "extract.regex.pattern: '(' is not a valid regular expression: missing ), unterminated subpattern at position 0",
    ),
    (
        {"rules": [{}, {"extract": "regex"}]},
        "rules.1.extract.regex.pattern: this key is missing; write { regex = { pattern = … } }",
    ),
    ({"extract": {"number": {"last": True}}}, "extract.number.last: unknown key; known: none"),
    ({"extract": {"json": 1}}, "extract.json: found 1, expected table"),
    (
        {"extract": {"json": {}, "number": {}}},
        f'extract: found {{"json": {{}}, "number": {{}}}}, {PLACEHOLDER}',
    ),
    ({"scorers": [1]}, f"scorers: found 1, {PLACEHOLDER}"),
    ({"scorers": "em"}, 'scorers: found "em", expected a list; write ["em"]'),
    ({"scorers": ["numeric", {"numeric": {}}]}, "scorers: has numeric twice; leave one out"),
    (
        {"scorers": ["em", {"numeric": {"tolerance": "1 %"}}]},
        'scorers.numeric.tolerance: found "1 %", expected number ≥ 0',
    ),
    (
        {"scorers": [{"judge": {"max_scor": 10}}]},
        "scorers.judge.max_scor: unknown key; did you mean 'max_score'?",
    ),
    (
        {"tolerance": 0.1},
        "tolerance: unknown key; did you mean 'scoring.scorers.numeric.tolerance'?",
    ),
]


@pytest.mark.parametrize(("scoring", "message"), MISTAKES)
def test_a_wrong_extractor_scorer_or_parameter_names_its_key(
    scoring: dict[str, Any], message: str
) -> None:
    with pytest.raises(JobError) as error:
        job(scoring)
    assert str(error.value) == f"test: 1 problem\n  scoring.{message}"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("scoring.extract.regex.pattern=1", {"extract": {"regex": {"pattern": "1"}}}),
        (
            'scoring.scorers=["em", { judge = { max_score = 5 } }, "numeric"]',
            {"scorers": ["em", {"judge": {"max_score": 5.0}}, {"numeric": {"tolerance": 0.01}}]},
        ),
    ],
)
def test_parameters_can_be_set_on_the_command_line(override: str, expected: dict[str, Any]) -> None:
    found = job({}, override).scoring
    assert found.model_dump(exclude_defaults=True) == expected
    assert job(found.model_dump()).scoring == found
