"""The keys ``extract`` and ``scorers`` of a job file, with their parameters."""

from __future__ import annotations

from typing import Any

import pytest

from batchkit.config.loading import make_job
from batchkit.config.tables import JobConfig
from batchkit.errors import JobError


def job(scoring: dict[str, Any], *overrides: str) -> JobConfig:
    return make_job({"engine": {"kind": "dry-run"}, "scoring": scoring}, "test", overrides)


MISTAKES: list[tuple[dict[str, Any], str]] = [  # …: any text between, or behind it
    ({"extract": {"regex": {"pattern": "("}}}, "extract.regex.pattern: '(' is not a valid regular"),
    ({"rules": [{}, {"extract": "regex"}]}, "rules.1.extract.regex.pattern: this key is missing"),
    ({"extract": {"number": {"last": True}}}, "extract.number.last: unknown key; known: none"),
    ({"extract": {"json": 1}}, "extract.json: found 1, expected table"),
    ({"extract": {"json": {}, "number": {}}}, 'extract: found {"json": {}, "number": {}}'),
    ({"scorers": [1]}, "scorers: found 1, expected a name, or a table { NAME = { PARAMETER ="),
    ({"scorers": "em"}, 'scorers: found "em", expected a list; write ["em"]'),
    ({"scorers": ["numeric", {"numeric": {}}]}, "scorers: has numeric twice; leave one out"),
    ({"scorers": ["em", {"numeric": {"tolerance": "1 %"}}]}, "scorers.numeric.tolerance: found "),
    ({"scorers": [{"judge": {"max_scor": 10}}]}, "scorers.judge.max_scor: …mean 'max_score'?"),
    ({"tolerance": 0.1}, "tolerance: …mean 'scoring.scorers.numeric.tolerance'?"),
]


@pytest.mark.parametrize(("scoring", "message"), MISTAKES)
def test_a_wrong_extractor_scorer_or_parameter_names_its_key(
    scoring: dict[str, Any], message: str
) -> None:
    with pytest.raises(JobError) as error:
        job(scoring)
    start, _, end = message.partition("…")
    (line,) = str(error.value).removeprefix("test: 1 problem\n  scoring.").splitlines()
    assert (line.startswith(start), line.endswith(end)) == (True, True), line


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
