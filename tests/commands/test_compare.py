"""``compare``: differences between runs, row by row, with intervals that hold what they promise."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchkit.commands.report import write_comparison
from batchkit.errors import JobError, StoreError
from batchkit.runs.compare import compare
from batchkit.runs.paired import bootstrap_interval
from tests.support.made_runs import GROUPS, failure, make_run, rows
from tests.support.pages import data_in

N = 60
NO_IMAGES = {"images": []}


def right_from(first: int) -> Any:
    """Answers that are right from row ``first`` on."""

    def answer(index: int, row: Mapping[str, Any]) -> str:
        return f"[Final Answer]: {row['FinalAnswer'] if index >= first else 'nothing'}"

    return answer


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """``a``: wrong in rows 0 to 29; ``b``: in 0 to 9, 55 of its rows, one failed, 50 is worse."""
    place = tmp_path_factory.mktemp("compare")

    def better(index: int, row: Mapping[str, Any]) -> Any:
        if index in (50, 51):
            return failure("timeout") if index == 51 else "[Final Answer]: value nothing"
        return right_from(10)(index, row)

    first = make_run(place / "1", rows(N, 1), right_from(30), name="a", prompt=NO_IMAGES)
    other = {"prompt": NO_IMAGES, "sampling": {"temperature": 0.5}}
    second = make_run(place / "2", rows(N - 5, 1), better, name="b", **other)
    return [first, second]


def test_difference_is_over_the_rows_that_both_scored(runs: list[Path]) -> None:
    found = compare(runs)
    (em,) = [d for d in found.deltas if d.scorer == "em" and d.group is None]
    assert em.n == N - 5 - 1
    assert (em.better, em.worse) == (20, 1)
    assert em.delta == pytest.approx(100 * 19 / 54)
    assert em.low < em.delta < em.high
    assert em.is_clear
    assert found.only_in_baseline == {"b": 5}
    assert found.only_in_run == {"b": 0}
    groups = [d for d in found.deltas if d.scorer == "em" and d.group is not None]
    assert sum(d.n for d in groups) == em.n
    assert sum(d.delta * d.n for d in groups) == pytest.approx(em.delta * em.n)


def test_flipped_rows_are_named(runs: list[Path]) -> None:
    flips = [flip for flip in compare(runs).flips if flip.scorer == "em"]
    assert [flip.id for flip in flips if flip.after > flip.before] == [
        f"q{n}" for n in range(10, 30)
    ]
    assert [(flip.id, flip.before, flip.after) for flip in flips if flip.after < flip.before] == [
        ("q50", 1.0, 0.0)
    ]
    # Half of the words of row 50 are still right: that far a graded score must move.
    assert "q50" in {flip.id for flip in compare(runs).flips if flip.scorer == "f1"}


def test_run_against_itself_has_no_difference(runs: list[Path]) -> None:
    found = compare([runs[0], runs[0]])
    assert found.runs == ["a (1)", "a (2)"]
    assert {(d.delta, d.low, d.high, d.better, d.worse) for d in found.deltas} == {(0, 0, 0, 0, 0)}
    assert not found.flips
    assert not found.warnings


@pytest.mark.parametrize("case", ["a filter", "another input"])
def test_rows_that_share_an_id(case: str, tmp_path: Path) -> None:
    """The first of the twins is missing from ``b``; in another input, none can be told from another."""
    table = [{**row, "id": "twin"} for row in rows(2, 1)]
    first = make_run(tmp_path / "1", table, right_from(1), name="a", prompt=NO_IMAGES)
    if case == "a filter":
        by_type = {"path": "qa.json", "records": "queries", "id": "id"}
        by_type |= {"where": {"QuestionType": table[1]["QuestionType"]}}
    else:
        table, by_type = table[1:], {}
    second = make_run(
        tmp_path / "2", table, right_from(0), name="b", prompt=NO_IMAGES, input=by_type
    )
    found = compare([first, second])
    (em,) = [d for d in found.deltas if d.scorer == "em" and d.group is None]
    assert (em.better, em.worse) == ((0, 0) if case == "a filter" else (1, 0))
    assert found.only_in_baseline == {"b": 1}


def test_rows_are_grouped_by_a_field_that_a_run_did_not_keep(tmp_path: Path) -> None:
    table, answer = rows(9, 1), right_from(3)
    first = make_run(tmp_path / "1", table, answer, name="a", prompt=NO_IMAGES)
    tables: dict[str, Any] = {"output": {"keep": []}, "scoring": {"group_by": "FileName"}}
    second = make_run(tmp_path / "2", table, answer, name="b", prompt=NO_IMAGES, **tables)
    found = compare([first, second])
    assert found.tables[0].to_json()["metrics"] == found.tables[1].to_json()["metrics"]
    assert [*found.tables[1].groups] == [*GROUPS]
    assert "b: its rows are grouped by QuestionType, like those of a" in found.warnings


def test_what_decides_the_answers_is_warned_of(runs: list[Path]) -> None:
    warnings = compare(runs).warnings
    assert "b: sampling.temperature: 0.0 → 0.5" in warnings
    assert "b: input: the files are not the same" in warnings


def test_text_and_json_say_the_same(runs: list[Path]) -> None:
    found = compare(runs)
    as_json = json.loads(json.dumps(found.to_json()))
    assert as_json["runs"] == ["a", "b"]
    assert as_json["tables"]["a"]["overall"]["em"] == 50
    text = found.to_text()
    (line,) = [line for line in text.splitlines() if line.startswith("| all ") and " EM " in line]
    assert [cell.strip() for cell in line.split("|")[3:9]] == [
        "54",
        "50.00",
        "79.63",
        "+35.19 *",
        line.split("|")[7].strip(),
        "20",
    ]
    assert "EM worse: q50" in text
    assert text.startswith(f"a: a/model, {found.origins['a'][1]}\nb: ")


def test_multinomial_draws_are_the_plain_paired_bootstrap() -> None:
    rng = np.random.default_rng(0)
    differences = rng.choice([-1.0, 0.0, 0.25, 1.0], 200, p=[0.1, 0.6, 0.1, 0.2])
    plain = differences[rng.integers(0, 200, (20_000, 200))].mean(axis=1)
    wanted = np.percentile(plain, (2.5, 97.5))
    found = bootstrap_interval(differences, resamples=20_000, rng=rng)
    assert found == pytest.approx(tuple(wanted), abs=0.006)


def test_interval_of_many_rows_is_the_normal_one() -> None:
    rng = np.random.default_rng(0)
    differences = rng.normal(0.1, 1, 50_000)  # more distinct values than are drawn exactly
    low, high = bootstrap_interval(differences, resamples=500, rng=rng)
    assert (high - low) / 2 == pytest.approx(1.96 / 50_000**0.5, rel=0.15)
    assert (high + low) / 2 == pytest.approx(differences.mean(), abs=0.001)


def test_comparison_as_a_page(runs: list[Path], tmp_path: Path) -> None:
    found = compare([*runs, runs[0]])
    assert len({delta.run for delta in found.deltas}) == 2, "each against the first"
    assert compare([*runs, runs[0]]).deltas == found.deltas, "seeded"
    data = data_in(write_comparison(found, tmp_path / "compare.html"))["comparison"]
    assert data == json.loads(json.dumps(found.to_json()))
    assert any("sampling.temperature: 0.0 → 0.5" in warning for warning in data["warnings"])
    assert data["origins"][found.runs[0]][0] == "a/model"
    assert {*data["heads"]} == {delta.scorer for delta in found.deltas}


def test_one_run_is_no_comparison(runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(JobError, match="two runs"):
        compare(runs[:1])
    with pytest.raises(StoreError, match="not a run folder"):
        compare([runs[0], tmp_path])
